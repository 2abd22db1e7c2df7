"""The command line: python -m lowprec COMMAND. Each command loads only what it needs."""

import difflib
import os
import signal
import sys
import time
from pathlib import Path

from lowprec import UserError


def data(argv: list[str]) -> None:
    """Build a corpus's token shards (data prepare CORPUS), or write a capture's q, k, v and dO."""
    from typing import Literal

    import tyro

    from lowprec.training.data.shards import build

    def prepare(
        corpus: tyro.conf.Positional[str],
        out: Path | None = None,
        vocab_dir: Path | None = None,
        processes: int | None = None,
        tokens: int | None = None,
        vocabulary: Literal["gpt2", "bytes"] = "gpt2",
    ):
        """Build the token shards of a corpus; they do not depend on the number of processes.

        Args:
            corpus: pysource, fineweb, openwebtext, or a .txt, .jsonl or .parquet file or folder.
            out: the folder to write, by default shards/NAME.
            vocab_dir: a folder with GPT-2's encoder.json and vocab.bpe, else they are downloaded.
            processes: how many tokenise side by side, by default one a core.
            tokens: where to stop, by default 200 million of fineweb and openwebtext, all of a path.
            vocabulary: of text other than pysource; bytes needs no files and no network.
        """
        build(corpus, out, vocab_dir, processes, tokens, vocabulary)

    def capture(name: tyro.conf.Positional[str], file: tyro.conf.Positional[Path]):
        """Write q, k, v and dO of a capture into a safetensors file, with causal and scale.

        Args:
            name: of a capture in data/captures, such as fa2-a-seed1-1680, or a path.
            file: to write, .safetensors.
        """
        from lowprec.diagnose import contenders

        output(file, ".safetensors")
        if file.exists():
            raise UserError(f"{file} exists and is never overwritten; choose another name")
        inputs = contenders.named(name)
        ours = {} if Path(name).is_file() else {"licence": "MIT"}
        contenders.write(inputs, file, **ours)
        words = ", MIT licence" if ours else ""
        print(f"{file}: q, k, v, do {tuple(inputs.q.shape)} {inputs.q.dtype}, causal{words}")

    tyro.extras.subcommand_cli_from_dict(
        {"prepare": prepare, "capture": capture}, prog="python -m lowprec data", args=argv
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
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # else a second Ctrl-C takes the status
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


def probe(argv: list[str]) -> int:
    """Say whether a model, a checkpoint or a capture is about to fail."""
    import inspect

    import tyro

    from lowprec.diagnose import probe as affected
    from lowprec.records import files

    def command(
        model: tyro.conf.Positional[Path],
        text: Path | None = None,
        policy: str | None = None,
        sequences: int = 4,
        length: int = 512,
        figure: Path | None = None,
        table: Path | None = None,
        device: str = "auto",
        fail_on_alarm: bool = False,
    ):
        """Say whether a model, a checkpoint or a capture is about to fail.

        Exit status 0: it was read, whatever was found; 1: an alarm, with --fail-on-alarm; 2: a
        mistake in the arguments.

        Args:
            model: a transformers folder or config.json, a Llama's .gguf, a run's checkpoint.pt or
                nanoGPT's ckpt.pt, or a capture, in data/captures also its name.
            text: a text file, read by the model's own tokenizer if that lies beside it or in the
                .gguf; by default the committed text as GPT-2's tokens, which are noise to a model
                with another vocabulary.
            policy: of attention, by default FA2 or what the run used.
            sequences: how many sequences of the text to read.
            length: tokens of a sequence.
            figure: where to draw what the alarm reads, .png, .svg or .pdf.
            table: where to write a row for each layer and head, .csv.
            device: cuda or cpu; by default a GPU if there is one. Captures are read on the CPU.
            fail_on_alarm: end with status 1 if a head rings, for scripts.
        """
        output(table, ".csv")
        output(figure, ".png", ".svg", ".pdf")
        result = affected.probe(
            model, text, policy, sequences, length, device=device, progress=True
        )
        shown = result.nlargest(10, "share").to_string(index=False, float_format="{:.3g}".format)
        print(shown, affected.verdict(result), sep="\n\n")
        if table:
            content = result.to_csv(index=False).encode()
            files.write_atomic(table, lambda file: file.write(content))
        if figure:
            save(affected.figure(result), figure)
        return int(fail_on_alarm and result.alarm.any())

    columns = "\n".join(f"- {name}: {words}" for name, words in affected.COLUMNS.items())
    what = inspect.cleandoc(command.__doc__).partition("Args:")[0]
    about = f"{what}Columns; it prints the ten heads of largest share:\n{columns}"
    return tyro.cli(command, prog="python -m lowprec probe", description=about, args=argv)


def bisect(argv: list[str]) -> int:
    """Find which roundings are guilty of the error of a captured head, or of an explosion."""
    from typing import Literal

    import tyro

    from lowprec.diagnose import bisect as search
    from lowprec.diagnose import contenders
    from lowprec.training.capture import Capture

    if argv[:1] == ["--train"]:
        return _bisect_runs(argv[1:])

    def command(
        capture: tyro.conf.Positional[str],
        policy: str | None = None,
        of: Literal["dq", "wq", "row_sum"] = "dq",
        within: float = search.WITHIN,
        size: int | None = None,
        modes: bool = False,
    ):
        """Find the smallest sets of fields that must be in FP32 for an error to go.

        The capture is replayed on the CPU. Exit status 0: sets were found; 1: nothing helps.
        Whole trainings instead: bisect --train PRESET --out FOLDER ...

        Args:
            capture: a file that a run's --capture-at wrote, or one of data/captures by its name,
                such as fa2-a-seed1-1680.
            policy: whose error it is, by default the captured one; a healthy twin wants FA2 or LOW.
            of: the error of dQ, of W_Q's gradient, or the sum of dS, against float64.
            within: the share of the error that a set may leave.
            size: try all sets of up to so many fields, by default as many as 300 replays allow.
            modes: let sets have other changes as well, such as delta_from=o_fp32.
        """
        path = contenders.path_named(capture)
        replays = search.Replays(captured := Capture.load(path))
        given = search.PrecisionPolicy.parse(policy or captured.policy)
        began = time.perf_counter()
        found = search.guilty(replays, given, of, within, size, modes)
        where = f"layer {captured.layer} at step {captured.step:,}"
        print(f"{captured.path.stem}, {where}, under {given}: {search.ERRORS[of]}\n", flush=True)
        print("\n\n".join(map(search.report, found)))
        seconds = time.perf_counter() - began
        print(f"\n{search.reach(found[0])} {len(replays.done)} replays in {seconds:.1f} seconds.")
        return int(not any(head.sets for head in found))

    return tyro.cli(command, prog="python -m lowprec bisect", args=argv)


def _bisect_runs(argv: list[str]) -> int:
    import tyro

    from lowprec.diagnose.bisect import shown
    from lowprec.diagnose.bisect_runs import Trainings
    from lowprec.training.config import PRESETS, TrainConfig

    if not argv or argv[0] in ("-h", "--help"):
        print("usage: python -m lowprec bisect --train PRESET --out FOLDER ...\n")
        print(f"  PRESET    {', '.join(PRESETS)}; bisect --train PRESET --help lists the options")
        return 0 if argv else 2
    name = known("preset", argv[0], PRESETS)

    def command(
        *, config: TrainConfig = PRESETS[name], out: Path, size: int | None = None,
        modes: bool = False,
    ):  # fmt: skip
        """Find the smallest sets of fields that must be in FP32 for a training not to explode.

        Each set is a training of `steps`. Exit status 0: sets were found; 1: nothing helps.

        Args:
            config: those of the preset unless given; policy is the one that explodes.
            out: the folder for the runs; those that are there are not trained again.
            size: try all sets of up to so many fields.
            modes: let sets have other changes as well, such as delta_from=o_fp32.
        """
        trainings = Trainings(config, out)
        sets = trainings.search(size, modes)
        for policy, onset in trainings.onsets.items():
            print(f"{policy}: {'no explosion' if onset is None else f'explodes at step {onset:,}'}")
        told = f"No explosion with {' or '.join(map(shown, sets))}; a bare name is a field in FP32."
        print(f"\n{told if sets else 'Nothing helps.'}", end=" ")
        print(f"{len(trainings.onsets)} trainings of {config.steps:,} steps.")
        return int(not sets)

    return tyro.cli(
        command, prog=f"python -m lowprec bisect --train {name}", args=argv[1:],
        config=(tyro.conf.OmitArgPrefixes,),
    )  # fmt: skip


def compare(argv: list[str]) -> int:
    """Say of two attention functions whether they differ by a bug or by rounding."""
    import inspect
    from typing import Annotated, Literal

    import torch
    import tyro

    from lowprec.diagnose import compare as two
    from lowprec.diagnose import contenders
    from lowprec.records import files
    from lowprec.training.loop import pick_device

    def command(
        a: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="A")],
        b: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="B")],
        on: Annotated[str, tyro.conf.arg(metavar="random|captures|FILE")] = "random",
        causal: tyro.conf.FlagCreatePairsOff[bool] = False,
        no_causal: tyro.conf.FlagCreatePairsOff[bool] = False,
        shape: tuple[int, int, int, int] = (1, 4, 256, 64),
        kv_heads: int | None = None,
        dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16",
        seed: int = 0,
        device: str = "auto",
        table: Path | None = None,
        figure: Path | None = None,
    ):
        """Say of two attention functions whether they differ by a bug or by rounding.

        Both are compared with float64 attention. Exit status 0: both err at most twice as much as
        a plain attention in the dtype of the inputs, and with no sign; 1: one does not; 2: a
        mistake in the arguments.

        Args:
            a: a policy such as FA2 or SAFE+row_sum=removed, emulated; sdpa, flash, cudnn, efficient
                or math, of PyTorch; eager, a plain attention; or module:function from the working
                directory, called as PyTorch's scaled_dot_product_attention.
            b: the other one.
            on: random; captures, the committed q, k, v and dO of real models, or one by its name;
                or a safetensors file with q, k, v, do (batch, heads, tokens, head_dim), its
                metadata causal and scale, or with a boolean mask in place of causal. Biases are not
                compared.
            causal: of random inputs, and of a file whose metadata do not say.
            no_causal: of such a file; random inputs are not causal by default.
            shape: of random inputs, batch, heads, tokens, head_dim.
            kv_heads: of random inputs, heads of keys and values if fewer.
            dtype: of random inputs.
            seed: of random inputs.
            device: cuda or cpu; by default a GPU if there is one.
            table: where to write a row for each input, function and quantity, .csv.
            figure: where to draw the errors, .png, .svg or .pdf.
        """
        output(table, ".csv")
        output(figure, ".png", ".svg", ".pdf")
        calls = {"A": contenders.function(a, "A"), "B": contenders.function(b, "B")}
        if causal and no_causal:
            raise UserError("give one of --causal and --no-causal")
        said = None if causal == no_causal else causal
        usual = shape == (1, 4, 256, 64) and kv_heads is None and dtype == "bfloat16" and seed == 0
        if on != "random" and not usual:
            raise UserError("--shape, --kv-heads, --dtype and --seed are of random inputs")
        if on == "captures":
            if said is False:
                raise UserError("--no-causal: the captures are causal")
            inputs = contenders.captures()
        elif on == "random":
            inputs = [contenders.drawn(shape, kv_heads, causal, seed, getattr(torch, dtype))]
        else:
            inputs = [contenders.read(on, said)]
        place = pick_device(device)
        inputs = [some.to(place) for some in inputs]
        found = two.measure(calls, inputs)
        names = {"A": f"A ({a})", "B": f"B ({b})"}
        print(*(f"{who}: {text}" for who, text in (("A", a), ("B", b))), sep="\n")
        kinds = {True: "causal", False: "not causal", None: "with a mask"}
        masked = sorted({kinds[None if x.mask is not None else x.causal] for x in inputs})
        of = sorted({str(x.q.dtype).removeprefix("torch.") for x in inputs})
        sizes = " or ".join(sorted({two.sizes(x) for x in inputs}))
        print(f"inputs: {on}, {' or '.join(of)}, {' or '.join(masked)}, on {place}, {sizes}")
        more = f"{'no mask' if causal else '--causal'}, another scale, " * (on == "random")
        more += "fewer heads of keys (--kv-heads), " * (on == "random" and kv_heads is None)
        more += "other masks, windows, " if inputs[0].mask is None else ""
        print(f"not tried: {more}biases")
        print("", two.shown(found), "", two.verdict(found, names), sep="\n")
        if table:
            content = found.to_csv(index=False).encode()
            files.write_atomic(table, lambda file: file.write(content))
        if figure:
            save(two.figure(found, {"A": "A", "B": "B"}), figure)
        return int(len(two.outside(found)) > 0)

    columns = "\n".join(f"- {name}: {words}" for name, words in two.COLUMNS.items())
    what = inspect.cleandoc(command.__doc__).partition("Args:")[0]
    about = f"{what}Columns of the table; it prints the input nearest to a limit:\n{columns}"
    return tyro.cli(command, prog="python -m lowprec compare", description=about, args=argv)


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
    f.__name__: f
    for f in (data, train, campaign, pack, verify, probe, bisect, compare, notebook, claims, pages)
}


def output(path: Path | None, *kinds: str) -> None:
    """Raise `UserError` for a file that cannot be written or has another ending."""
    from lowprec.records import runs

    if path and path.suffix not in kinds:
        raise UserError(f"{path} must end in {' or '.join(kinds)}")
    if path and not path.parent.is_dir():
        raise UserError(f"there is no folder {path.parent} for {path.name}")
    if path:
        runs.require_writable(path)


def save(fig, path: Path) -> None:
    """Write a matplotlib figure, whole or not at all, in the format of the file's ending."""
    from lowprec.records import files

    how = dict(format=path.suffix[1:], facecolor="white")
    files.write_atomic(path, lambda file: fig.savefig(file, **how))


def known(kind: str, name: str, names) -> str:
    """The name if it is one of `names`, else a `UserError` with the closest."""
    if name not in names:
        close = difflib.get_close_matches(name, names, n=1)
        hint = f"did you mean {close[0]}?" if close else f"take one of {', '.join(names)}"
        raise UserError(f"there is no {kind} {name!r}: {hint}")
    return name


def main(argv: list[str]) -> int:
    """Run one command; its status, 0 if it has none, or 2 with one sentence on stderr for a user's
    mistake."""
    if not argv or argv[0] in ("-h", "--help"):
        print("usage: python -m lowprec COMMAND ...; COMMAND --help has its options\n")
        for name, command in COMMANDS.items():
            print(f"  {name:9} {command.__doc__}")
        return 0
    try:
        status = COMMANDS[known("command", argv[0], COMMANDS)](argv[1:])
        sys.stdout.flush()
    except UserError as error:
        print(f"lowprec: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # `| head` has read enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        print("lowprec: interrupted", file=sys.stderr)
        return 130
    return status or 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
