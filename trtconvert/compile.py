"""`trtconvert compile`: give a bundle the engine of the GPU that it has reached. Needs no model code and no calibration."""

from __future__ import annotations

import contextlib
import difflib
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from trtconvert.bundle import (
    MANIFEST,
    EngineRecord,
    FileRecord,
    Manifest,
    check_files,
    file_record,
    lost_plans,
    read_manifest,
    write_sealed,
)
from trtconvert.cache import Cache, Stage, default_folder
from trtconvert.documents import YamlError, parse_yaml
from trtconvert.engine import tensorrt
from trtconvert.errors import UserError
from trtconvert.files import is_open_file, locked, path_of, require_writable, settled, sweep_files, whole_file
from trtconvert.locks import DAY, lock
from trtconvert.progress import Reporter
from trtconvert.recipe import EngineSection
from trtconvert.stages.common import ENGINE, VERIFY, Engines, example_of
from trtconvert.stages.component_errors import engine_errors
from trtconvert.stages.engines import EngineBuild, engine_stages
from trtconvert.stages.shapes import narrowed

_INSTEAD = "copy the bundle to another place"

_CHANGEABLE = (
    "attention",
    "workspace_mb",
    "optimization_level",
    "shapes",
    "profiles",
    "refittable",
    "version_compatible",
    "hardware_compatible",
    "weight_streaming",
    "channels_last",
)
"""Fields of a recipe's engine section that the machine with the GPU may decide."""

_SHOWN = 80
"""Characters of an option's value that messages repeat."""


def compile_bundle(folder: Path, report: Reporter, cache: Cache | None = None, changes: Sequence[str] = ()) -> Manifest:
    """Build a TensorRT engine for this machine's GPU from each component's ONNX, into the bundle.

    The engines are built in the cache, where a later call finds them, whatever ends this one. Then they are put beside what is in
    the bundle, and a new manifest takes the old one's place: until then, the bundle is what it was. Of several that compile one
    bundle at a time, each waits for the others and keeps their engines.

    Args:
        cache: the user's own by default.
        changes: of the engine section of the bundle's recipe, as "engine.attention=native"; the bundle keeps them.
    Returns:
        The new manifest.
    Raises:
        UserError: not a bundle, an altered one, or one that is replaced while its engines are built; it cannot be written; or a
            change does not fit.
        BackendUnavailable: no GPU, no TensorRT, or no plugin library here.
        TrtconvertError: the engine cannot be built.
        GateError: its prediction is too far from full precision's in a timestep bin. The bundle stays what it was.
    """
    # Who switches a link to another bundle meanwhile changes what is served, and not which bundle gets the engines.
    folder = settled(folder).resolve()
    _changed(read_manifest(folder), changes)  # a change that does not fit is told before TensorRT is loaded
    tensorrt.load()
    backend, cache = tensorrt.status(), cache or Cache(default_folder())
    with _alone(folder, report.notice) as unchanged:
        manifest = read_manifest(folder)
        check_files(folder, manifest)
        manifest = _changed(manifest, changes)
        gpu = str(tensorrt.device_architecture()), tensorrt.device_name()
        require_writable(folder / MANIFEST, _INSTEAD)  # nobody wants to hear it after the build
        for name in manifest.components:
            require_writable(folder / EngineRecord.of(name, "tensorrt", "", *gpu).file, _INSTEAD)
        how, built = EngineBuild(manifest.recipe.engine, backend, cache, report), dict[str, Engines]()

        def finish(path: Path) -> None:
            if not unchanged():
                raise _replaced(folder)
            write_sealed(path, _with_engines(folder, manifest, built))

        with report.live():
            for name, component in manifest.components.items():
                read = _as_stage(folder, manifest, name)

                def refuse_another(name: str = name, read: Stage = read) -> None:
                    now = _changed(read_manifest(folder), changes)
                    if name not in now.components or _as_stage(folder, now, name).key != read.key:
                        raise _replaced(folder)

                try:
                    made = engine_stages(how, name, component, read, refuse_another)
                    verified = _verified if component.is_denoiser else _verified_component
                    built[name] = verified(folder, manifest, name, made, report)
                except (OSError, UserError) as error:
                    if not unchanged():
                        raise _replaced(folder) from error  # with the files that the build was reading
                    if isinstance(error, UserError):
                        raise
                    if (path := path_of(error)) is None or folder not in path.parents:
                        raise
                    raise UserError(
                        f"cannot read {error.filename}",
                        expected="the file as it was when the command began",
                        got=str(error.strerror),
                        remedy="change its permissions, or copy the bundle again, and run the command again",
                    ) from error
        try:
            with whole_file(folder / MANIFEST, _INSTEAD, finish, through_link=False):
                pass  # `finish` writes it, under the lock that keeps others from replacing the bundle
        finally:
            _remove_plans(folder, manifest)
    return read_manifest(folder)


def _verified(folder: Path, manifest: Manifest, name: str, engines: Engines, report: Reporter) -> Engines:
    """The engines of a denoiser with the error of their predictions, on the calls that the bundle holds.

    Raises:
        GateError: it is above `verify.max_prediction_error` of the bundle's recipe.
    """
    component = manifest.components[name]
    if VERIFY not in manifest.files:  # a bundle of an earlier version
        return engines
    from trtconvert.evaluate.gates import check_predictions
    from trtconvert.evaluate.recorded_calls import RecordedCalls
    from trtconvert.runtime.batches import AnyBatch
    from trtconvert.runtime.bundles import engine_component

    calls, measured = RecordedCalls.load(folder / VERIFY), []
    with report.stage(f"verify {name}"):
        for record, stage in engines:
            with contextlib.closing(engine_component(stage.folder / ENGINE, record, component)) as denoiser:
                try:
                    errors = calls.errors(AnyBatch(denoiser))
                except UserError as error:  # --set gave the engine other sizes than the calls have
                    report.notice(
                        f"the engine is not verified, as it does not take the recorded calls: {error.problem}"
                    )
                    errors = []
            check_predictions(Path(record.file).name, errors, manifest.recipe.verify, calls.type_errors)
            measured.append((record.model_copy(update={"prediction_error": errors}), stage))
    return measured


def _verified_component(folder: Path, manifest: Manifest, name: str, engines: Engines, report: Reporter) -> Engines:
    """The engines of another component with the error of their outputs, on the call that the bundle holds.

    Raises:
        GateError: it is above `verify.max_component_error` of the bundle's recipe.
    """
    if example_of(name) not in manifest.files:  # a bundle of an earlier version
        return engines
    from trtconvert.evaluate.component_example import ComponentExample
    from trtconvert.evaluate.gates import check_component

    component, measured = manifest.components[name], []
    example = ComponentExample.load(folder / example_of(name), component)
    with report.stage(f"verify {name}"):
        for record, stage in engines:
            errors = engine_errors(example, component, record, stage)
            error = check_component(name, component, errors, manifest.recipe.verify.max_component_error)
            measured.append((record.model_copy(update={"error": error}), stage))
    return measured


def _remove_plans(folder: Path, before: Manifest) -> None:
    """Remove the engines that others have replaced, and what compiles that failed or were killed left of theirs.

    Nothing depends on it: what cannot be removed stays, and fails nothing.
    """
    with contextlib.suppress(OSError, UserError):
        # Under this lock each compile puts its plans into the bundle and into the manifest.
        with locked(folder):
            now = read_manifest(folder)
            engines = {engine.file for component in before.components.values() for engine in component.engines}
            for name in (engines - now.files.keys()) | {*lost_plans(folder, now)}:
                (folder / name).unlink(missing_ok=True)
        sweep_files(folder / "engines")


def _changed(manifest: Manifest, changes: Sequence[str]) -> Manifest:
    """The manifest of a bundle whose recipe says something else of engines.

    Raises:
        UserError: a change is none of the engine section, does not fit, or asks for shapes that the ONNX does not have.
    """
    given = dict(_parsed(change) for change in changes)
    of_shapes = given.keys() & {"shapes", "profiles"}
    if len(of_shapes) == 1:  # one takes the place of the other
        given |= {"profiles": []} if "shapes" in given else {"shapes": {}}
    try:
        engine = EngineSection.model_validate(manifest.recipe.engine.model_dump() | given)
    except ValidationError as error:
        first = error.errors()[0]
        raise UserError(
            "the bundle's recipe and the command line do not fit together",
            expected=f"{'.'.join(map(str, ('engine', *first['loc'])))}: {first['msg'].removeprefix('Value error, ')}",
            got=", ".join(f"--set {change}" for change in changes),
            remedy="correct the option; `trtconvert schema` describes every field",
        ) from error
    components = dict(manifest.components)
    for name, component in components.items():
        if of_shapes and component.is_denoiser:  # the others keep their models' own shapes, as in `trtconvert build`
            profiles = [narrowed(ranges, component.dims, name, component.steps) for ranges in engine.ranges()]
            components[name] = component.model_copy(update={"profiles": profiles})
    recipe = manifest.recipe.model_copy(update={"engine": engine})
    return manifest.model_copy(update={"recipe": recipe, "components": components})


def _parsed(change: str) -> tuple[str, Any]:
    """Field and value of "engine.FIELD=VALUE", whose value is YAML."""
    name, equals, text = change.partition("=")
    section, _, field = name.partition(".")
    if section != "engine" or field not in _CHANGEABLE or not equals:
        near = difflib.get_close_matches(field or name, _CHANGEABLE, n=1, cutoff=0.5)
        raise UserError(
            f"--set {change} is nothing that can be changed in a bundle",
            expected=f"engine.FIELD=VALUE; the fields are {', '.join(_CHANGEABLE)}",
            got=change,
            remedy=f"did you mean 'engine.{near[0]}=…'?" if near else "change the recipe, and build the bundle again",
        )
    try:
        return field, parse_yaml(text)
    except YamlError as error:
        raise UserError(
            f"--set engine.{field}: not valid YAML",
            expected="engine.FIELD=VALUE, with a value in YAML",
            got=f"{error.got}: {text if len(text) <= _SHOWN else text[:_SHOWN] + '…'}",
            remedy="correct the option; a missing bracket, or a missing space after ':' is the usual cause",
        ) from error


def _replaced(folder: Path) -> UserError:
    return UserError(
        f"the bundle {folder} was replaced while its engines were built",
        expected="the bundle as it was when the command began",
        got="another one, as `trtconvert build` leaves it" if (folder / MANIFEST).exists() else "no bundle",
        remedy="run the command again; it takes from the cache what fits",
    )


def _as_stage(folder: Path, manifest: Manifest, name: str) -> Stage:
    """A component of a bundle as what the build of its engines reads: its files, and what the manifest says of it."""
    component = manifest.components[name]
    files = {file: record.sha256 for file, record in manifest.files.items() if file.startswith(component.onnx)}
    reads = [files, component.model_dump(mode="json", exclude={"engines"})]
    return Stage(hashlib.sha256(json.dumps(reads, sort_keys=True).encode()).hexdigest(), folder, reused=True)


def _with_engines(folder: Path, manifest: Manifest, built: Mapping[str, Engines]) -> Manifest:
    """Copy the engines into the bundle, beside those that they replace, and describe what the bundle holds then.

    Args:
        built: by component, the engine and where it is.
    """
    components, files, gpu, versions = {}, dict(manifest.files), "", dict(manifest.versions)
    for name, component in manifest.components.items():
        ((engine, stage),) = built[name]
        file, content = _placed(folder, Path(engine.file), stage)
        replaced = [old for old in component.engines if _serves_the_same(old, engine)]
        for old in replaced:
            files.pop(old.file, None)
        files[file] = content
        others = [other for other in component.engines if other not in replaced]
        engines = [*others, engine.model_copy(update={"file": file})]
        components[name] = component.model_copy(update={"engines": engines})
        gpu, versions["tensorrt"] = engine.gpu or engine.target, engine.library
    changed = {
        "components": components,
        "files": files,
        "backend": "tensorrt",
        "backend_reason": f"`trtconvert compile` on {gpu}",
        "versions": versions,
    }
    return manifest.model_copy(update=changed)


def _serves_the_same(old: EngineRecord, new: EngineRecord) -> bool:
    """Whether two engines are of one kind of GPU, whatever their files are called. Records of before do not name the GPU."""
    return (old.backend, old.target) == (new.backend, new.target) and old.gpu in ("", new.gpu)


def _placed(folder: Path, usual: Path, stage: Stage) -> tuple[str, FileRecord]:
    """Copy a stage's plan into the bundle, unless it is there.

    Args:
        usual: its path in the bundle, where nothing else has it.
    Returns:
        The plan's path in the bundle, and what it is there.
    Raises:
        UserError: the stage is another one than was taken.
    """
    expected = stage.hashes[ENGINE]
    beside = usual.with_stem(f"{usual.stem}-{expected[:8]}")
    for file in (usual, beside):
        if (folder / file).is_file() and (content := file_record(folder / file)).sha256 == expected:
            return str(file), content
    # The old manifest still names what stands there.
    file = beside if (folder / usual).exists() else usual
    with whole_file(folder / file, _INSTEAD, through_link=False) as path:
        shutil.copyfile(stage.folder / ENGINE, path)
        content = file_record(path)
        if content.sha256 != expected:
            raise UserError(
                f"the engine in the build cache was replaced or damaged while it was copied into {folder}",
                expected=f"SHA-256 {expected[:12]}…",
                got=f"{content.sha256[:12]}…, from {stage.folder}",
                remedy="run the command again",
            )
    return str(file), content


@contextmanager
def _alone(folder: Path, say: Callable[[str], None]) -> Iterator[Callable[[], bool]]:
    """Holds the lock of a bundle, its manifest's. What it gives tells whether the manifest is still there, as it was.

    Whoever had the lock leaves another manifest, with a lock of its own, so the lock is taken again until it is that of the
    manifest which is there. Where the file system has no locks, of several that compile the bundle all but one are refused in
    the end.

    Args:
        say: told where another process has the lock, and where there is none.
    """
    while True:
        read_manifest(folder)  # refuses what is no bundle, or none any more
        try:
            handle = _opened(folder / MANIFEST)
        except FileNotFoundError:
            continue
        try:
            has_lock = lock(handle, folder, wait=DAY, say=say)
            if not has_lock:
                say(f"{folder} is on a file system without locks: compile it on one machine at a time")
            if is_open_file(handle, folder / MANIFEST):
                yield partial(is_open_file, handle, folder / MANIFEST)
                return
        finally:
            os.close(handle)


def _opened(path: Path) -> int:
    """A handle to lock a file with. NFS locks for writing only what is open for writing."""
    try:
        return os.open(path, os.O_RDWR)
    except FileNotFoundError:
        raise
    except OSError:
        return os.open(path, os.O_RDONLY)
