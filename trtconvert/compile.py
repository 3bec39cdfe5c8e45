"""`trtconvert compile`: builds the engines for this machine's GPU into a bundle, without model code and calibration."""

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
from trtconvert.engine.builder import kernels_kept
from trtconvert.errors import UserError
from trtconvert.files import (
    is_open_file,
    locked,
    path_of,
    real_path,
    require_writable,
    settled,
    sweep_files,
    whole_file,
)
from trtconvert.locks import DAY, lock
from trtconvert.progress import Reporter
from trtconvert.recipe import Recipe
from trtconvert.stages.common import ENGINE, RECORDED_CALLS, Engines, example_of
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
"""Fields of the recipe's engine section that `--set` may change."""

_SHOWN = 80
"""Largest number of characters of an option's value in messages."""


def compile_bundle(folder: Path, report: Reporter, cache: Cache | None = None, changes: Sequence[str] = ()) -> Manifest:
    """Builds a TensorRT engine for this machine's GPU from each component's ONNX model, into the bundle.

    The engines are built in the cache, where a later call finds them even if this call fails. Then they are copied into the
    bundle, and a new manifest replaces the old one, which stays valid until then. Several processes that compile one bundle wait
    for each other and keep each other's engines.

    Args:
        cache: default: the user's cache.
        changes: changes of the recipe's engine section, such as "engine.attention=native"; the bundle keeps them.
    Returns:
        The new manifest.
    Raises:
        UserError: the folder is not a bundle, the bundle is damaged, cannot be written or was replaced meanwhile, or a change
            does not fit.
        BackendUnavailable: there is no GPU, TensorRT or plugin library.
        TrtconvertError: an engine cannot be built.
        GateError: an engine's prediction is too far from full precision in a timestep bin. The bundle stays unchanged.
    """
    # Resolved once: a link that is switched meanwhile does not redirect the engines into another bundle.
    folder = real_path(settled(folder))
    _changed(read_manifest(folder), changes)  # reports wrong changes before TensorRT is loaded
    tensorrt.load()
    backend, cache = tensorrt.status(), cache or Cache(default_folder())
    with _alone(folder, report.notice) as unchanged:
        manifest = read_manifest(folder)
        check_files(folder, manifest)
        manifest = _changed(manifest, changes)
        gpu = str(tensorrt.device_architecture()), tensorrt.device_name()
        engines = (EngineRecord.of(name, "tensorrt", "", *gpu).file for name in manifest.components)
        for name in (MANIFEST, *engines):  # before the build takes its time
            require_writable(folder / name, _INSTEAD, through_link=False)
        how, built = EngineBuild(manifest.recipe.engine, backend, cache, report), dict[str, Engines]()

        def finish(path: Path) -> None:
            if not unchanged():
                raise _replaced(folder)
            write_sealed(path, _with_engines(folder, manifest, built))

        with report.live(), kernels_kept():
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
                        raise _replaced(folder) from error  # together with the files that the build was reading
                    if isinstance(error, UserError):
                        raise
                    if (path := path_of(error)) is None or folder not in path.parents:
                        raise
                    raise UserError(
                        f"cannot read {error.filename}",
                        expected="the file as at the start of the command",
                        got=str(error.strerror),
                        remedy="change its permissions, or copy the bundle again, and run the command again",
                    ) from error
        try:
            with whole_file(folder / MANIFEST, _INSTEAD, finish, through_link=False):
                pass  # `finish` writes the file, under the lock of the folder
        finally:
            _remove_plans(folder, manifest)
    return read_manifest(folder)


def _verified(folder: Path, manifest: Manifest, name: str, engines: Engines, report: Reporter) -> Engines:
    """Measures the prediction error of a denoiser's engines on the bundle's recorded calls.

    Raises:
        GateError: an error is above the recipe's `verify.max_prediction_error`.
    """
    component = manifest.components[name]
    if RECORDED_CALLS not in manifest.files:  # an older bundle
        return engines
    from trtconvert.evaluate.gates import check_predictions
    from trtconvert.models.recorded_calls import RecordedCalls
    from trtconvert.runtime.batches import AnyBatch
    from trtconvert.runtime.bundles import engine_component

    calls, measured = RecordedCalls.load(folder / RECORDED_CALLS), []
    with report.stage(f"verify {name}"):
        for record, stage in engines:
            with contextlib.closing(engine_component(stage.folder / ENGINE, record, component)) as denoiser:
                try:
                    errors = calls.errors(AnyBatch(denoiser))
                except UserError as error:  # --set changed the engine's sizes
                    report.notice(f"the engine is not verified: it does not take the recorded calls: {error.problem}")
                    errors = []
            check_predictions(Path(record.file).name, errors, manifest.recipe.verify, calls.type_errors)
            measured.append((record.model_copy(update={"prediction_error": errors}), stage))
    return measured


def _verified_component(folder: Path, manifest: Manifest, name: str, engines: Engines, report: Reporter) -> Engines:
    """Measures the output error of another component's engines on the bundle's recorded call.

    Raises:
        GateError: an error is above the recipe's `verify.max_component_error`.
    """
    if example_of(name) not in manifest.files:  # an older bundle
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
    """Removes replaced engines, and plans of failed or killed compiles. Files that cannot be removed stay."""
    with contextlib.suppress(OSError, UserError):
        # Every compile writes its plans and the manifest under this lock.
        with locked(folder):
            now = read_manifest(folder)
            engines = {engine.file for component in before.components.values() for engine in component.engines}
            for name in (engines - now.files.keys()) | {*lost_plans(folder, now)}:
                (folder / name).unlink(missing_ok=True)
        sweep_files(folder / "engines")


def _changed(manifest: Manifest, changes: Sequence[str]) -> Manifest:
    """Applies changes of the engine section to a manifest.

    Raises:
        UserError: a change names no changeable field, does not fit, or asks for shapes that the ONNX model does not have.
    """
    given = dict(_parsed(change) for change in changes)
    of_shapes = given.keys() & {"shapes", "profiles"}
    if len(of_shapes) == 1:  # shapes and profiles exclude each other
        given |= {"profiles": []} if "shapes" in given else {"shapes": {}}
    stated = manifest.recipe.model_dump()
    try:
        recipe = Recipe.model_validate(stated | {"engine": stated["engine"] | given})
    except ValidationError as error:
        first = error.errors()[0]
        place = first["loc"] or first.get("ctx", {})["place"]  # the latter of fields that do not fit other sections
        raise UserError(
            "the command line does not fit the bundle's recipe",
            expected=f"{'.'.join(map(str, place))}: {first['msg'].removeprefix('Value error, ')}",
            got=", ".join(f"--set {change}" for change in changes),
            remedy="correct the option; `trtconvert schema` describes every field",
        ) from error
    components = dict(manifest.components)
    for name, component in components.items():
        if of_shapes and component.is_denoiser:  # other components keep their models' shapes, as in `trtconvert build`
            profiles = [narrowed(ranges, component.dims, name, component.steps) for ranges in recipe.engine.ranges()]
            components[name] = component.model_copy(update={"profiles": profiles})
    return manifest.model_copy(update={"recipe": recipe, "components": components})


def _parsed(change: str) -> tuple[str, Any]:
    """Parses "engine.FIELD=VALUE" with a YAML value into field and value."""
    name, equals, text = change.partition("=")
    section, _, field = name.partition(".")
    if section != "engine" or field not in _CHANGEABLE or not equals:
        near = difflib.get_close_matches(field or name, _CHANGEABLE, n=1, cutoff=0.5)
        raise UserError(
            f"--set {change} cannot be changed in a bundle",
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
            remedy="correct the option: check the brackets and the space after ':'",
        ) from error


def _replaced(folder: Path) -> UserError:
    return UserError(
        f"the bundle {folder} was replaced while its engines were built",
        expected="the bundle as at the start of the command",
        got="another bundle" if (folder / MANIFEST).exists() else "no bundle",
        remedy="run the command again; it takes fitting engines from the cache",
    )


def _as_stage(folder: Path, manifest: Manifest, name: str) -> Stage:
    """Returns a bundle's component as the stage that the build of its engines reads: its files and its record."""
    component = manifest.components[name]
    files = {file: record.sha256 for file, record in manifest.files.items() if file.startswith(component.onnx)}
    reads = [files, component.model_dump(mode="json", exclude={"engines"})]
    return Stage(hashlib.sha256(json.dumps(reads, sort_keys=True).encode()).hexdigest(), folder, reused=True)


def _with_engines(folder: Path, manifest: Manifest, built: Mapping[str, Engines]) -> Manifest:
    """Copies the engines into the bundle beside the engines that they replace, and returns the new manifest."""
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
    """Returns whether two engines are for one kind of GPU. Older records do not name the GPU."""
    return (old.backend, old.target) == (new.backend, new.target) and old.gpu in ("", new.gpu)


def _placed(folder: Path, usual: Path, stage: Stage) -> tuple[str, FileRecord]:
    """Copies a stage's plan into the bundle, unless the bundle has it already.

    Args:
        usual: the plan's path in the bundle, if no other plan has that path.
    Returns:
        The plan's path in the bundle, and its file record.
    Raises:
        UserError: the stage was replaced or damaged in the cache.
    """
    expected = stage.hashes[ENGINE]
    beside = usual.with_stem(f"{usual.stem}-{expected[:8]}")
    for file in (usual, beside):
        if (folder / file).is_file() and (content := file_record(folder / file)).sha256 == expected:
            return str(file), content
    # The old manifest still names the file at the usual path.
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
    """Holds the lock of a bundle's manifest, and yields a function that returns whether the manifest is unchanged.

    The previous holder replaces the manifest, and a new manifest has a lock of its own, so this takes locks until it holds that
    of the current manifest. On file systems without locks, `compile_bundle` refuses all but one of several processes at the end.

    Args:
        say: called with a text if another process holds the lock, or the file system has no locks.
    """
    while True:
        read_manifest(folder)  # raises if the folder is not a bundle, or no longer one
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
    """Opens a file for locking. NFS needs a file that is open for writing."""
    try:
        return os.open(path, os.O_RDWR)
    except FileNotFoundError:
        raise
    except OSError:
        return os.open(path, os.O_RDONLY)
