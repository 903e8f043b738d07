"""Imports run downward only, and light things stay light."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "tst_lightning"

# each file may import only from those before it
ORDER = [
    "errors",
    "signals",
    "text",
    "bags",
    "losses",
    "phases",
    "batches",
    "config",
    "hardware",
    "optim",
    "model",
    "parallel",
    "generation",
    "generation.sampling",
    "generation.decoding",
    "sharded",
    "checkpoints",
    "data",
    "data.stores",
    "data.permutation",
    "data.mixture",
    "data.order",
    "data.distribute",
    "data.read_ahead",
    "data.windows",
    "data.corpus",
    "data.publish",
    "data.pieces",
    "data.formats",
    "data.formats.blocks",
    "data.formats.plain",
    "data.formats.jsonl",
    "data.formats.columns",
    "data.formats.parquet",
    "data.formats.hub",
    "data.documents",
    "data.verify",
    "data.jobs",
    "data.pool",
    "data.parts",
    "data.foreign",
    "data.foreign.stream",
    "data.foreign.nanogpt",
    "data.foreign.llmc",
    "data.foreign.megatron",
    "data.foreign.litdata_tokens",
    "data.foreign.plan",
    "data.foreign.cut",
    "data.foreign.documents",
    "data.foreign.text_bytes",
    "data.tokenise",
    "data.shuffle",
    "data.split_writer",
    "data.assemble",
    "data.single",
    "data.shards",
    "data.prepare_job",
    "data.merge_job",
    "data.supervise",
    "data.workplace",
    "data.options",
    "data.prepared",
    "data.prepare",
    "data.merge",
    "data.import_job",
    "data.import_tokens",
    "data.inspect",
    "data.sources",
    "data.datamodule",
    "loggers",
    "callbacks",
    "strategies",
    "callbacks.ranks",
    "callbacks.steps",
    "callbacks.switch",
    "callbacks.metrics",
    "callbacks.checkpoint",
    "callbacks.stop",
    "callbacks.progress",
    "callbacks.throughput",
    "callbacks.samples",
    "non_finite",
    "resume",
    "trainer_checks",
    "module",
    "report",
    "report.recipe",
    "report.runs",
    "report.find",
    "report.groups",
    "report.speedup",
    "report.compare",
    "report.words",
    "report.page",
    "report.plot",
    "report.command",
    "generation.command",
    "consolidate",
    "cli",
]


def module_name(path):
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__")


def imported(path):
    """Names of our own modules that a file imports at run time, ``if TYPE_CHECKING`` left out."""

    def walk(node):
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            return
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("tst_lightning"):
            base = (node.module or "").removeprefix("tst_lightning").removeprefix(".")
            for alias in node.names:
                full = f"{base}.{alias.name}".removeprefix(".")
                yield full if full in ORDER else base
        if isinstance(node, ast.Import):
            yield from (
                a.name.removeprefix("tst_lightning.") for a in node.names if a.name.startswith("tst_lightning.")
            )
        for child in ast.iter_child_nodes(node):
            yield from walk(child)

    return set(walk(ast.parse(path.read_text())))


FILES = [path for path in sorted(PACKAGE.rglob("*.py")) if module_name(path) not in ("", "__main__")]


@pytest.mark.parametrize("path", FILES, ids=module_name)
def test_imports_run_downward(path):
    name = module_name(path)
    assert name in ORDER, f"{name} has no place in ORDER yet"
    above = {other for other in imported(path) if other and ORDER.index(other) >= ORDER.index(name)}
    assert not above, f"{name} imports {above}, which stand above it"


def test_the_check_itself_sees_an_upward_import(tmp_path):
    bad = tmp_path / "bags.py"
    bad.write_text("from tst_lightning.module import TSTModule\nimport tst_lightning.cli\n")
    assert imported(bad) == {"module", "cli"}


def loaded_by(code, *arguments):
    """Which of the heavy packages are loaded after running ``code`` in a new interpreter."""
    probe = (
        "import sys\n"
        "try:\n"
        f"    {code}\n"
        "except SystemExit as stop:\n"
        "    assert not stop.code, stop.code\n"
        "names = ('torch', 'lightning', 'litdata', 'tokenizers', 'numpy', 'torchmetrics', 'matplotlib')\n"
        "names += ('pyarrow', 'zstandard', 'datasets', 'obstore')\n"
        "print('LOADED', *[n for n in names if n in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", probe, *arguments], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return result.stdout.splitlines()[-1].split()[1:]


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["--version"],
        ["prepare", "--help"],
        ["merge", "--help"],
        ["import", "--help"],
        ["inspect", "--help"],
        ["report", "--help"],
        ["generate", "--help"],
    ],
    ids=" ".join,
)
def test_light_commands_load_nothing_heavy(arguments):
    assert loaded_by("from tst_lightning.__main__ import main; main(sys.argv[1:])", *arguments) == []


def test_report_on_a_run_loads_nothing_heavy(tmp_path):
    (tmp_path / "metrics.csv").write_text("phase/bag_size,step,tokens/data,tokens/latent\n1,1,8,8\n")
    assert loaded_by("from tst_lightning.__main__ import main; main(['report', sys.argv[1]])", str(tmp_path)) == []


@pytest.mark.parametrize(
    "name",
    [
        "errors",
        "text",
        "phases",
        "batches",
        "config",
        "hardware",
        "data.distribute",
        "data.corpus",
        "data.documents",
        "generation.command",
    ],
)
def test_torch_free_rooms(name):
    assert loaded_by(f"import tst_lightning.{name}") == []


@pytest.mark.parametrize("name", ["bags", "losses", "optim", "model", "generation.sampling", "checkpoints"])
def test_what_another_training_stack_takes_needs_no_lightning(name):
    assert "lightning" not in loaded_by(f"import tst_lightning.{name}")


def test_every_exported_name_resolves_and_is_listed():
    import tst_lightning

    assert set(tst_lightning.__all__) == set(tst_lightning._HOME_OF)
    for name in tst_lightning.__all__:
        assert getattr(tst_lightning, name).__name__.rpartition(".")[2] == name
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = tst_lightning.nothing
    assert set(tst_lightning.__all__) <= set(dir(tst_lightning))
