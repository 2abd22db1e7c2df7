"""Number formats, policies that name every rounding, and whether two machines agree on one."""
