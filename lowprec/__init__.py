"""lowprec: why low-precision transformer training fails, with evidence a reader can recompute.

The package is thin on purpose: number formats, attention whose every rounding site is a named
knob, a GPT-2 trainer, and the small tools that turn measurements into verdicts. Importing it is
light; torch loads with the first submodule that needs it. `from lowprec import sdpa` is a drop-in
for PyTorch's scaled_dot_product_attention, see `lowprec.attention.drop_in`.
"""

__version__ = "0.1.0"


class UserError(Exception):
    """A mistake the user can mend; the message is one sentence that names the thing and the mend.

    The command line prints the message alone and exits with status 2; Jupyter shows it without a
    traceback.
    """

    def _render_traceback_(self):
        return [f"lowprec: {self}"]


def load_yaml(text: str):
    """What a YAML text says, read with libyaml where PyYAML has it, seven times as fast.

    Raises yaml.YAMLError in the words of PyYAML's own, also for a name that stands twice in one
    mapping, of which YAML would take the last. 1.1 and 1.10 are one name, and so are yes and on,
    unless they stand in quotes.
    """
    import yaml

    class Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):
        def construct_mapping(self, node, deep=False):
            keys = [key for key, _ in node.value if not key.tag.endswith(":merge")]
            read = [self.construct_object(key, deep=True) for key in keys]
            for i, key in enumerate(keys):
                if read[i] in read[:i]:
                    problem = f"{key.value} stands twice, again in line {key.start_mark.line + 1}"
                    raise yaml.constructor.ConstructorError(problem=problem)
            return super().construct_mapping(node, deep)

    try:
        return yaml.load(text, Loader)
    except yaml.YAMLError:
        yaml.safe_load(text)
        raise


def yaml_fault(error) -> str:
    """What is wrong in a YAML file, and where, in one line."""
    problem = getattr(error, "problem", None) or str(error).splitlines()[0]
    mark = getattr(error, "problem_mark", None)
    where = f" in line {mark.line + 1}, column {mark.column + 1}" if mark else ""
    hint = "; quote a text that has ': ' in it" if problem.startswith("mapping values") else ""
    return f"{problem}{where}{hint}"


def entry(main) -> None:
    """Run the `main` of a module as a command: a `UserError` is its message and status 2, Ctrl-C
    one line and 130."""
    import sys

    try:
        main()
    except UserError as error:
        print(f"lowprec: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("lowprec: interrupted", file=sys.stderr)
        sys.exit(130)


PUBLIC = {
    "sdpa": "attention.drop_in", "emulate": "attention.reference", "oracle": "attention.reference",
    "PrecisionPolicy": "numerics.policy", "Format": "numerics.formats",
    "round_to": "numerics.formats", "ulp": "numerics.formats",
    "train": "training.loop", "TrainConfig": "training.config", "Capture": "training.capture",
    "load_run": "records.runs", "load_runs": "records.runs", "load_arms": "evidence.survival",
    "probe": "diagnose.probe", "Monitor": "diagnose.monitor",
    "claims": "evidence", "plots": "publish",
}  # fmt: skip
"""The names to rely on, and where they live; each loads when it is first asked for."""


def __getattr__(name: str):
    if name not in PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    home = f"lowprec.{PUBLIC[name]}"
    if PUBLIC[name] in ("evidence", "publish"):
        return importlib.import_module(f"{home}.{name}")
    return getattr(importlib.import_module(home), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *PUBLIC})
