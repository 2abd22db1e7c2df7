"""The command line: python -m lowprec COMMAND. Each command loads only what it needs."""

import difflib
import os
import sys
from pathlib import Path

from lowprec import UserError


def data(argv: list[str]) -> None:
    """Build a corpus's token shards: data prepare pysource|fineweb|openwebtext|PATH."""
    import tyro

    from lowprec.training.data.shards import build

    def prepare(
        corpus: tyro.conf.Positional[str],
        out: Path | None = None,
        vocab_dir: Path | None = None,
        processes: int | None = None,
        tokens: int | None = None,
    ):
        """Build the token shards of a corpus; they do not depend on the number of processes.

        Args:
            corpus: pysource, fineweb, openwebtext, or a .txt, .jsonl or .parquet file or folder.
            out: the folder to write, by default shards/NAME.
            vocab_dir: a folder with GPT-2's encoder.json and vocab.bpe, else they are downloaded.
            processes: how many tokenise side by side, by default one a core.
            tokens: where to stop, by default 200 million of fineweb and openwebtext, all of a path.
        """
        build(corpus, out, vocab_dir, processes, tokens)

    tyro.extras.subcommand_cli_from_dict(
        {"prepare": prepare}, prog="python -m lowprec data", args=argv
    )


def train(argv: list[str]) -> None:
    """Train one model into a new run folder: train PRESET --out FOLDER ..."""
    import tyro

    from lowprec.training.config import PRESETS, TrainConfig
    from lowprec.training.loop import train as run

    if not argv or argv[0] in ("-h", "--help"):
        print("usage: python -m lowprec train PRESET --out FOLDER ...\n")
        print(f"  PRESET    {', '.join(PRESETS)}; train PRESET --help lists the options")
        return
    name = known("preset", argv[0], PRESETS)

    def command(
        *, config: TrainConfig = PRESETS[name], out: Path, arm: str = "", resume: bool = False
    ):
        """Train one model into a new run folder.

        Args:
            config: those of the preset unless given.
            out: the run folder to write; it must not exist.
            arm: the run's arm in its campaign, by default the policy.
            resume: go on from the last checkpoint if the run was interrupted.
        """
        done = run(config, out, arm, resume)
        if os.environ.get("RANK", "0") == "0":
            print(done.summary())

    # Presets are no subcommands of tyro's: it would call the program `python` in its hints.
    tyro.cli(
        command, prog=f"python -m lowprec train {name}", args=argv[1:],
        config=(tyro.conf.OmitArgPrefixes,),
    )  # fmt: skip


def campaign(argv: list[str]) -> None:
    """Run what is missing of a campaign, one run a GPU or a Slurm job."""
    import signal
    from typing import Literal

    import tyro

    from lowprec.training.campaign import Slurm, run_campaign

    def command(
        path: tyro.conf.Positional[Path],
        gpus: int | None = None,
        out: Path | None = None,
        only: tuple[str, ...] = ("*",),
        processes: int = 1,
        cluster: Literal["local", "slurm"] = "local",
        slurm: Slurm = Slurm(),  # noqa: B008
    ):
        """Run what is missing of a campaign: each run on one GPU or several, or as a Slurm job.

        Args:
            path: the campaign's YAML file.
            gpus: runs side by side, by default as many as there are GPUs for.
            out: folder for the runs instead of the file's own.
            only: these runs alone, by name: ARM-seedN, with * for anything.
            processes: how many train a run together on this machine, each on a GPU of its own; a
                divisor of batch_size, and 1 for runs with captures or windows.
            cluster: this machine, or the Slurm cluster that sbatch reaches.
        """
        if cluster == "local" and slurm != Slurm():
            raise UserError("these options are for a cluster; add --cluster slurm")
        if not only:
            raise UserError("--only wants the names of runs, as in --only 'low-*' fa2-seed0")
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: stop the runs
        chosen = slurm if cluster == "slurm" else None
        results = run_campaign(path, gpus, out, chosen, only, processes)
        for name, result in results.items():
            print(f"{name}: {result}")
        failed = [name for name, result in results.items() if result.startswith("failed")]
        if failed:
            raise UserError(f"{len(failed)} of {len(results)} runs failed: {', '.join(failed)}")

    try:
        tyro.cli(
            command, prog="python -m lowprec campaign", args=argv,
            config=(tyro.conf.OmitArgPrefixes,),
        )  # fmt: skip
    except KeyboardInterrupt:
        goes_on = "the same command goes on from checkpoints, if checkpoint_every makes them"
        print(f"lowprec: stopped; {goes_on}", file=sys.stderr)
        sys.exit(130)


def pack(argv: list[str]) -> None:
    """Put the runs of a finished campaign into three files: pack CAMPAIGN."""
    import tyro

    from lowprec.training.pack import pack as run

    def command(campaign: tyro.conf.Positional[str]):
        """Put the runs of a finished campaign into three files, which are read as before.

        Args:
            campaign: its name in data/runs, or its folder. What was packed before stays in.
        """
        print(run(campaign))

    tyro.cli(command, prog="python -m lowprec pack", args=argv)


def verify(argv: list[str]) -> None:
    """Check every file of data/ against the manifest."""
    import tyro

    from lowprec.records import manifest

    def command(write: bool = False):
        """Check every file of data/ against the manifest.

        Args:
            write: record the files as they are now instead.
        """
        if write:
            manifest.write_manifest()
        print(f"data/: {manifest.verify()} files are as the manifest says")

    tyro.cli(command, prog="python -m lowprec verify", args=argv)


def probe(argv: list[str]) -> None:
    """Say whether a model, a checkpoint or a capture is about to fail."""
    import tyro

    from lowprec.diagnose import probe as affected
    from lowprec.records import files, runs

    def command(
        model: tyro.conf.Positional[Path],
        text: Path | None = None,
        policy: str | None = None,
        sequences: int = 4,
        length: int = 512,
        figure: Path | None = None,
        table: Path | None = None,
    ):
        """Say whether a model, a checkpoint or a capture is about to fail.

        Args:
            model: a transformers folder or config.json, a run's checkpoint.pt, or a capture.
            text: a text file, by default the committed text as GPT-2's tokens, which are noise to a
                model with another vocabulary.
            policy: of attention, by default FA2 or what the run used.
            sequences: how many sequences of the text to read.
            length: tokens of a sequence.
            figure: where to draw what the alarm reads, .png, .svg or .pdf.
            table: where to write a row for each layer and head, .csv.
        """
        for path, kinds in ((figure, (".png", ".svg", ".pdf")), (table, (".csv",))):
            if path and path.suffix not in kinds:
                raise UserError(f"{path} must end in {' or '.join(kinds)}")
            if path and not path.parent.is_dir():
                raise UserError(f"there is no folder {path.parent} for {path.name}")
            if path:
                runs.require_writable(path)
        result = affected.probe(model, text, policy, sequences, length)
        shown = result.nlargest(10, "share").to_string(index=False, float_format="{:.3g}".format)
        print(shown, affected.verdict(result), sep="\n\n")
        if table:
            content = result.to_csv(index=False).encode()
            files.write_atomic(table, lambda file: file.write(content))
        if figure:
            draw, how = affected.figure(result).savefig, dict(facecolor="white")
            kind = figure.suffix[1:]
            files.write_atomic(figure, lambda file: draw(file, format=kind, **how))

    columns = "\n".join(f"- {name}: {words}" for name, words in affected.COLUMNS.items())
    about = f"{probe.__doc__}\n\nColumns; it prints the ten heads of largest share:\n{columns}"
    tyro.cli(command, prog="python -m lowprec probe", description=about, args=argv)


def notebook(argv: list[str]) -> None:
    """Execute one notebook into a page."""
    from lowprec.publish.notebook import main

    main(argv)


def claims(argv: list[str]) -> None:
    """Print the claims; with --write, write the book's generated pages."""
    from lowprec.publish.pages import main

    main(argv)


def pages(argv: list[str]) -> None:
    """Say where every page stands: its code, its words, its figures; a star is above the limit."""
    import tyro

    from lowprec.evidence.claims import page_named
    from lowprec.evidence.registry import pages_named
    from lowprec.publish import limits
    from lowprec.records.files import repo_root

    def command(names: tyro.conf.Positional[tuple[str, ...]] = ()):
        """Say where every page stands: its code, its words, its figures; a star is above the limit.

        Args:
            names: pages by the start of their names, such as the_exp or laboratory/; all by
                default. What a reader sees is counted of those that make has executed.
        """
        root = repo_root()
        measured = limits.pages(root)
        some = list(measured) if not names else []
        for name in names:
            some += pages_named(name, measured) or [page_named(name, root / "notebooks")]
        print(limits.table({page: measured[page] for page in some}))

    tyro.cli(command, prog="python -m lowprec pages", args=argv)


COMMANDS = {
    f.__name__: f for f in (data, train, campaign, pack, verify, probe, notebook, claims, pages)
}


def known(kind: str, name: str, names) -> str:
    """The name if it is one of `names`, else a `UserError` with the closest."""
    if name not in names:
        close = difflib.get_close_matches(name, names, n=1)
        hint = f"did you mean {close[0]}?" if close else f"take one of {', '.join(names)}"
        raise UserError(f"there is no {kind} {name!r}: {hint}")
    return name


def main(argv: list[str]) -> int:
    """Run one command; 0, or 2 with one sentence on stderr for a user's mistake."""
    if not argv or argv[0] in ("-h", "--help"):
        print("usage: python -m lowprec COMMAND ...\n")
        for name, command in COMMANDS.items():
            print(f"  {name:9} {command.__doc__}")
        return 0
    try:
        COMMANDS[known("command", argv[0], COMMANDS)](argv[1:])
        sys.stdout.flush()
    except UserError as error:
        print(f"lowprec: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # `| head` has read enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
