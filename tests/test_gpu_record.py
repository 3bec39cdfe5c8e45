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
                "-p",
                "no:unraisableexception",  # which collects garbage five times at the end, for seconds in a large process
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

PART = CARD | {
    "commit": "a",
    "sources": {},
    "code": "b",
    "date": "2026-11-28",
    "failed": [],
    "skipped": {},
    "seconds": 60,
}


def part(name: str, **changes) -> tuple:
    return name, PART | {"passed": 5, "files": {f"{name}.py": 1.0}} | changes


def test_parts_of_one_run_are_joined_in_any_order():
    whole = PART | {"passed": 9, "date": "2026-11-01"}
    first, second = (
        part("shared", skipped={"x": 1}),
        part("alone", failed=["y"], skipped={"x": 2, "z": 1}, date="2026-11-29"),
    )
    for one, other in ((first, second), (second, first)):
        record = gpu_record.with_part(whole, *one)
        assert record["passed"] == 9 and list(record["parts"]) == [one[0]]
        told = gpu_record.summary({"NVIDIA H100": record}, {})
        assert "the other part has not run" in told[0] and "9 passed" in told[1]
        record = gpu_record.with_part(record, *other)
        assert "parts" not in record and "code" not in record
        assert (record["passed"], record["failed"], record["seconds"]) == (10, ["y"], 120)
        assert record["skipped"] == {"x": 3, "z": 1} and record["date"] == "2026-11-29"
        assert record["files"] == {"shared.py": 1.0, "alone.py": 1.0}


@pytest.mark.parametrize(
    "changes", [{"commit": "c"}, {"driver": "581"}, {"code": "d"}, {"sources": {"a.cu": "1"}}], ids=str
)
def test_parts_of_two_runs_are_not_joined(changes):
    record = gpu_record.with_part({}, *part("shared"))
    record = gpu_record.with_part(record, *part("alone", **changes))
    assert list(record["parts"]) == ["alone"] and "passed" not in record
    assert "5 passed; the other part has not run" in gpu_record.summary({"NVIDIA H100": record}, {})[0]


def test_a_run_in_parts_is_recorded_as_one(run):
    code, records = run("def test_one(): pass\ndef test_two(): pass\n", part="shared")
    assert code == 0 and list(records["NVIDIA H100"]) == ["parts"]
    code, records = run("def test_one(): pass\ndef test_two(): pass\n", "-k", "two", part="alone")
    assert code == 0 and records["NVIDIA H100"]["passed"] == 3


def test_workers_report_to_the_process_that_records(run):
    code, records = run("def test_one(): pass\ndef test_two(): assert False\n", "-n", "2", "-p", "xdist")
    entry = records["NVIDIA H100"]
    assert code == 1 and entry["passed"] == 1 and len(entry["failed"]) == 1
