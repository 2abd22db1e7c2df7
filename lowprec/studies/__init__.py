"""What single pages measure: one module a question, used by no other part of the package but
where its page's measure became a tool."""
