"""The record of GPU tests: its content after a run, and the report about changed sources."""

import importlib.util
import json

import pytest
from support import REPOSITORY

_SPEC = importlib.util.spec_from_file_location("gpu_record", REPOSITORY / "tools" / "gpu_record.py")
gpu_record = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(gpu_record)

CARD = {"card": "NVIDIA H100", "driver": "580.1", "tensorrt": "10.6.0"}


@pytest.fixture
def run(tmp_path):
    """Run tests under a recorder, and return the records."""

    recorded = f"test_recorded_{tmp_path.name}.py"  # imported under a name of its own

    def run(body: str, *options: str, path=tmp_path / "record.json", part=None):
        (tmp_path / recorded).write_text("import pytest\n" + body)
        code = pytest.main(
            [
                "-q",
                "-c",
                str(tmp_path / "none.ini"),
                "-p",
                "no:cacheprovider",
                str(tmp_path / recorded),
                *options,
            ],
            plugins=[gpu_record.Recorder(CARD, path, part)],
        )
        return code, json.loads(path.read_text()) if path.is_file() else {}

    (tmp_path / "none.ini").write_text("[pytest]\n")
    return run


def test_a_run_is_recorded_by_its_card(run):
    code, records = run(
        "def test_good(): pass\n"
        "def test_bad(): assert False\n"
        "@pytest.mark.skip(reason='needs two GPUs')\ndef test_two(): pass\n"
        "@pytest.fixture\ndef broken(): raise OSError\n"
        "def test_never_begun(broken): pass\n"
    )
    entry = records["NVIDIA H100"]
    assert code == 1 and entry["passed"] == 1 and entry["skipped"] == {"needs two GPUs": 1}
    assert [name.rpartition("::")[2] for name in entry["failed"]] == ["test_bad", "test_never_begun"]
    assert entry["sources"] == gpu_record.source_hashes() and entry["driver"] == "580.1"
    lines = gpu_record.summary(records, gpu_record.source_hashes())
    assert "1 passed, 2 failed, 1 skipped" in lines[0] and "are those that ran" in lines[1]


def test_a_run_that_did_not_end_leaves_the_record(run, tmp_path):
    (tmp_path / "record.json").write_text('{"other": 1}')
    assert run("def test_stopped(): raise KeyboardInterrupt\n")[1] == {"other": 1}
    assert run("def test_none(): pass\n", "-k", "absent")[1] == {"other": 1}


def test_sources_that_changed_since_are_named(tmp_path):
    for name, text in (("a.cu", "1"), ("b.py", "1"), ("notes.md", "1")):
        (tmp_path / "plugins" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "plugins" / name).write_text(text)
    then = gpu_record.source_hashes(tmp_path)
    (tmp_path / "plugins/a.cu").write_text("2")
    (tmp_path / "plugins/b.py").unlink()
    (tmp_path / "plugins/notes.md").write_text("2")
    (tmp_path / "plugins/c.h").write_text("3")
    now = gpu_record.source_hashes(tmp_path)
    run = CARD | {"date": "2026-11-28", "passed": 3, "failed": [], "skipped": {}, "sources": then}
    lines = gpu_record.summary({"NVIDIA H100": run}, now)
    assert lines[1].endswith(": 3") and [line.strip() for line in lines[2:]] == [
        "plugins/a.cu", "plugins/b.py", "plugins/c.h"
    ]  # fmt: skip


def test_without_a_run_the_remedy_is_named():
    (line,) = gpu_record.summary({}, {})
    assert "make test-gpu" in line


# Parts ------------------------------------------------------------------------------------------------------------------

COUNTS = {f"tests/gpu/test_{i}.py": 1 + i % 7 for i in range(20)}
PART = CARD | {
    "commit": "a",
    "sources": {},
    "code": "b",
    "date": "2026-11-28",
    "failed": [],
    "skipped": {},
    "seconds": 60,
}


@pytest.mark.parametrize("of", [1, 2, 3])
@pytest.mark.parametrize("seconds", [{}, {f"tests/gpu/test_{i}.py": 5.0 * i for i in range(15)}], ids=["new", "known"])
def test_parts_have_each_file_once_and_take_about_the_same_time(of, seconds):
    shares = [gpu_record.files_of(gpu_record.Part(number, of), COUNTS, seconds) for number in range(1, of + 1)]
    assert sorted(file for share in shares for file in share) == sorted(COUNTS)
    each = sum(seconds.values()) / sum(COUNTS[file] for file in seconds) if seconds else 1.0
    loads = [sum(seconds.get(file, COUNTS[file] * each) for file in share) for share in shares]
    assert max(loads) < 1.3 * sum(loads) / of


def part(name: str, **changes) -> tuple:
    return gpu_record.Part.read(name), PART | {"passed": 5, "files": {f"{name}.py": 1.0}} | changes


def test_parts_of_one_run_are_joined_in_any_order():
    whole = PART | {"passed": 9, "date": "2026-11-01"}
    first, second = (
        part("1/2", skipped={"x": 1}),
        part("2/2", failed=["y"], skipped={"x": 2, "z": 1}, date="2026-11-29"),
    )
    for one, other in ((first, second), (second, first)):
        record = gpu_record.with_part(whole, *one)
        assert record["passed"] == 9 and list(record["parts"]) == [f"{one[0].number}/2"]
        told = gpu_record.summary({"NVIDIA H100": record}, {})
        assert "the other parts have not run" in told[0] and "9 passed" in told[1]
        record = gpu_record.with_part(record, *other)
        assert "parts" not in record and "code" not in record
        assert (record["passed"], record["failed"], record["seconds"]) == (10, ["y"], 120)
        assert record["skipped"] == {"x": 3, "z": 1} and record["date"] == "2026-11-29"
        assert record["files"] == {"1/2.py": 1.0, "2/2.py": 1.0}


@pytest.mark.parametrize(
    "changes", [{"commit": "c"}, {"driver": "581"}, {"code": "d"}, {"sources": {"a.cu": "1"}}], ids=str
)
def test_parts_of_two_runs_are_not_joined(changes):
    record = gpu_record.with_part({}, *part("1/2"))
    record = gpu_record.with_part(record, *part("2/2", **changes))
    assert list(record["parts"]) == ["2/2"] and "passed" not in record
    assert "5 passed; the other parts have not run" in gpu_record.summary({"NVIDIA H100": record}, {})[0]
    record = gpu_record.with_part(record, *part("1/3", **changes))
    assert list(record["parts"]) == ["1/3"]


@pytest.mark.parametrize("text", ["", "1", "0/2", "3/2", "1/2/3", "-1/2", "a/b", "1/0"])
def test_invalid_parts_are_refused(text):
    with pytest.raises(ValueError, match=r"--part: expected .* such as 1/2, got"):
        gpu_record.Part.read(text)


def test_a_run_in_parts_is_recorded_as_one(run, tmp_path):
    (tmp_path / "test_recorded_other.py").write_text("def test_three(): pass\n")
    body, other = "def test_one(): pass\ndef test_two(): pass\n", str(tmp_path / "test_recorded_other.py")
    code, records = run(body, other, part=gpu_record.Part(1, 2))
    assert code == 0 and list(records["NVIDIA H100"]) == ["parts"]
    code, records = run(body, other, part=gpu_record.Part(2, 2))
    entry = records["NVIDIA H100"]
    assert code == 0 and entry["passed"] == 3 and len(entry["files"]) == 2
