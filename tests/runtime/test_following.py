"""Denoisers that skip steps: computed steps, extrapolated steps, and when no step is skipped."""

from __future__ import annotations

import threading

import pytest
import torch
from diffusers import schedulers
from stated_steps import StatedSchedule, StatedSteps
from torch import Tensor

from trtconvert.bundle import GuidanceRecord
from trtconvert.errors import UserError
from trtconvert.guidance import FusedGuidance
from trtconvert.models.digits import digits_model
from trtconvert.reuse.schedule import Reuse, Schedule
from trtconvert.reuse.trajectories import Trajectories
from trtconvert.runtime.batches import AnyBatch
from trtconvert.runtime.halves import Halves
from trtconvert.runtime.reuse import Following, PipelineSteps, Reusable, follow
from trtconvert.shipped import shipped_folder

TIMES = (900.0, 800.0, 600.0, 300.0, 100.0)
COMPUTED = (True, True, False, False, True)


class Line:
    """A denoiser whose prediction is linear in the timestep, with another line for each sample and trajectory."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def __call__(self, x: Tensor, timestep: Tensor, slope: float = 1.0) -> Tensor:
        self.seen.append(float(timestep[0]))
        ramp = torch.arange(1.0, len(x) + 1).view(-1, 1)
        return (ramp * timestep.view(-1, 1).float() * slope + 3).expand(x.shape).contiguous()


def at(t: float, batch: int = 2) -> Tensor:
    return torch.full((batch,), t)


@pytest.fixture
def line() -> Line:
    return Line()


@pytest.fixture
def x() -> Tensor:
    return torch.zeros(2, 4)


def followed(line: Line, times=TIMES, computed=COMPUTED) -> Following:
    found = follow(Reusable(line, StatedSteps(computed)), times)
    assert isinstance(found, Following)
    return found


def test_linear_predictions_are_extrapolated_exactly(line, x):
    denoiser = followed(line)
    for t in TIMES:
        torch.testing.assert_close(denoiser(x, at(t)), Line()(x, at(t)), rtol=1e-6, atol=1e-4)
    assert line.seen == [900, 800, 100] and (denoiser.calls, denoiser.computed) == (5, 3)


class Curve:
    """A denoiser whose prediction is a parabola in the timestep."""

    def __call__(self, x: Tensor, timestep: Tensor) -> Tensor:
        return (timestep.view(-1, 1) / 100).square().expand(x.shape).contiguous()


def test_a_computed_step_takes_back_what_its_gap_has_moved(x):
    """Extrapolations of a parabola miss in one direction, and the correction follows the schedule's factor."""
    factors = tuple((1 + ahead, -ahead, 0.0) for ahead in (0.0, 0.0, 2.5, 4.0, 7.5))
    corrections = (0.0, 0.0, 0.0, 0.0, 0.5)
    denoiser = Following(Curve(), StatedSchedule(Schedule(COMPUTED, 0.0, factors, corrections)), TIMES)
    first, second, third, fourth, last = (float(denoiser(x, at(t))[0, 0]) for t in TIMES)
    assert (
        (first, second) == (81, 64) and third == pytest.approx(64 - 2.5 * 17) and fourth == pytest.approx(64 - 4 * 17)
    )
    line = 64 - 7.5 * 17
    assert last == pytest.approx(1 + 0.5 * (1 - line)) and (denoiser.calls, denoiser.computed) == (5, 3)


READING = ((1.0, 0.0, 0.0), (1.0, 0.0, 0.0), (0.5, 0.25, 2.0), (1.0, 0.0, -1.0), (0.0, 0.0, 3.0))
"""Factors of extrapolations, some of which read the sample."""


@pytest.mark.parametrize("by_name", [False, True])
def test_an_extrapolation_reads_the_sample_of_its_call(x, by_name):
    corrections = (0.0, 0.0, 0.0, 0.0, 0.5)
    denoiser = Following(Curve(), StatedSchedule(Schedule(COMPUTED, 0.0, READING, corrections)), TIMES)
    first, second, third, fourth, last = (
        float((denoiser(x=x + i, timestep=at(t)) if by_name else denoiser(x + i, at(t)))[0, 0])
        for i, t in enumerate(TIMES)
    )
    noisy = float(x[0, 0])
    assert (first, second) == (81, 64) and third == pytest.approx(0.5 * 64 + 0.25 * 81 + 2 * (noisy + 2))
    assert fourth == pytest.approx(64 - (noisy + 3)) and last == pytest.approx(1 + 0.5 * (1 - 3 * (noisy + 4)))
    assert (denoiser.calls, denoiser.computed) == (5, 3)


def test_the_first_prediction_and_the_sample_may_extrapolate(x):
    schedule = Schedule((True, False, True), 0.0, ((1.0, 0.0, 0.0), (0.5, 0.0, 2.0), (1.0, 0.0, 0.0)), (0.0, 0.0, 0.0))
    denoiser = Following(Curve(), StatedSchedule(schedule), TIMES[:3])
    first, second = denoiser(x, at(TIMES[0])), denoiser(x + 1, at(TIMES[1]))
    torch.testing.assert_close(second, 0.5 * first + 2 * (x + 1))


def test_samples_of_another_shape_than_the_prediction_are_computed(x):
    """Extrapolations that read the sample cannot take it."""
    inside = Curve()
    schedule = StatedSchedule(Schedule(COMPUTED, 0.0, READING, (0.0,) * 5))
    denoiser = Following(lambda x, timestep: inside(x, timestep)[:1], schedule, TIMES)
    for t in TIMES:
        denoiser(x, at(t))
    assert denoiser.computed == 5


def test_computed_steps_need_no_correction(x):
    corrections = (0.0, 0.0, 0.0, 0.0, 0.5)
    denoiser = Following(Curve(), StatedSchedule(Schedule(COMPUTED, 0.0, (), corrections)), TIMES)
    wide = torch.zeros(3, 4)
    for t in TIMES[:2]:
        denoiser(x, at(t))
    found = [float(denoiser(wide, at(t, 3))[0, 0]) for t in TIMES[2:]]
    assert found == pytest.approx([36, 9, 1])


def test_one_prediction_is_repeated(line, x):
    denoiser = followed(line, computed=(True, False, False, False, False))
    found = [denoiser(x, at(t)) for t in TIMES]
    assert line.seen == [900] and all(torch.equal(y, found[0]) for y in found)
    found[1] += 1  # which is the caller's
    assert not torch.equal(found[0], found[1])


def test_a_denoiser_without_a_schedule_is_returned_as_it_is(line):
    assert follow(line, TIMES) is line


def test_two_trajectories_that_take_turns(x):
    first, second = Line(), Line()
    one, other = followed(first), followed(second)
    for t in TIMES:
        torch.testing.assert_close(one(x, at(t)), Line()(x, at(t)), rtol=1e-6, atol=1e-4)
        torch.testing.assert_close(other(x, at(t), slope=-2.0), Line()(x, at(t), slope=-2.0), rtol=1e-6, atol=1e-4)


def test_other_shapes_are_computed_until_there_are_two_predictions(line, x):
    """For example when guidance ends half way."""
    denoiser = followed(line)
    wide = torch.zeros(3, 4)
    for t in TIMES[:2]:
        denoiser(x, at(t))
    for t in TIMES[2:]:
        denoiser(wide, at(t, 3))
    assert line.seen == list(TIMES)


def test_another_timestep_than_the_next_ends_it(line, x):
    denoiser = followed(line)
    denoiser(x, at(900.0)), denoiser(x, at(800.0))
    with pytest.warns(RuntimeWarning, match="from step 2 on: the timestep of this call is not that of the step"):
        denoiser(x, at(650.0))
    denoiser(x, at(300.0)), denoiser(x, at(100.0))
    assert line.seen == [900, 800, 650, 300, 100]


def test_predictions_older_than_the_schedules_do_not_serve(x):
    """As after steps without the call, by guidance that pauses."""
    line, computed = Line(), (True, True, False, True, True, False)
    times = (900.0, 800.0, 700.0, 600.0, 500.0, 400.0)
    denoiser = followed(line, times=times, computed=computed)
    for step in (0, 1, 5):
        denoiser.at(step, (x, at(times[step])), {})
    assert line.seen == [900, 800, 400]


def test_the_end_of_a_trajectory_frees_its_predictions(line, x):
    denoiser = followed(line)
    for t in TIMES:
        denoiser(x, at(t))
    assert not denoiser._kept


def test_timesteps_that_were_rounded_are_the_same(line, x):
    denoiser = followed(line, times=tuple(t + 0.3 for t in TIMES))
    for t in TIMES:
        denoiser(x, at(t))
    assert line.seen == [900, 800, 100]


def test_timesteps_in_bfloat16_are_the_same(line, x):
    times = (873.9, 750.2, 600.0, 300.0, 101.1)
    denoiser = followed(line, times=times)
    for t in times:
        denoiser(x, at(t).bfloat16())
    assert len(line.seen) == 3


def test_samples_at_different_steps_are_computed(line, x):
    denoiser = followed(line)
    with pytest.warns(RuntimeWarning, match="from step 0 on"):
        for t in TIMES:
            denoiser(x, torch.tensor([t, t - 50]))
    assert len(line.seen) == len(TIMES)


def test_calls_beyond_the_timesteps_are_computed(line, x):
    denoiser = followed(line)
    for t in (*TIMES, 90.0, 80.0):
        denoiser(x, at(t))
    assert line.seen == [900, 800, 100, 90, 80]


def test_predictions_that_somebody_wrote_into_do_not_serve(line, x):
    denoiser = followed(line)
    for t in TIMES:
        denoiser(x, at(t)).mul_(2)
    assert line.seen == list(TIMES)


def test_inference_tensors_that_somebody_wrote_into_serve_as_they_were(line, x):
    denoiser = followed(line)
    with torch.inference_mode():
        for t in TIMES:
            prediction = denoiser(x, at(t))
            torch.testing.assert_close(prediction, Line()(x, at(t)), rtol=1e-6, atol=1e-4)
            prediction.zero_()
    assert line.seen == [900, 800, 100]


def test_a_call_that_failed_is_repeated_at_its_step(x):
    """On a GPU the timestep is not read: a step further would be extrapolated as another one."""
    line = Line()

    def fails(x: Tensor, timestep: Tensor) -> Tensor:
        if float(timestep[0]) == 800 and len(line.seen) == 1:
            line.seen.append(-1)
            raise RuntimeError("out of memory")
        return line(x, timestep)

    denoiser = followed(fails)
    denoiser(x, at(900))
    with pytest.raises(RuntimeError):
        denoiser(x, at(800))
    assert denoiser.calls == 1
    for t in TIMES[1:]:
        denoiser(x, at(t))
    assert line.seen == [900, -1, 800, 100] and denoiser.calls == 5


def test_a_timestep_that_is_no_tensor_is_for_the_denoiser_to_refuse(x):
    def refuses(x: Tensor, timestep: float) -> Tensor:
        raise UserError(f"'timestep' is a {type(timestep).__name__}")

    with pytest.raises(UserError, match="is a float"):
        followed(refuses)(x, 900.0)


def test_following_reaches_through_wrappers_for_any_batch(line, x):
    inner = Reusable(line, StatedSteps(COMPUTED))
    inner.signature = None

    class Whole(AnyBatch):
        def __call__(self, *inputs, **named):
            return self._component(*inputs, **named)

    inner.device = torch.device("cpu")
    denoiser = follow(Whole(inner), TIMES)
    assert isinstance(denoiser, Following)


# Our samplers -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("solver", "steps", "calls"), [("ddim", 5, 3), ("euler", 5, 3), ("heun", 5, 9)])
def test_samplers_tell_their_timesteps_but_for_those_of_two_calls_a_step(solver, steps, calls):
    model = digits_model(shipped_folder() / "digits-dit.safetensors")
    counted = []

    def denoiser(*inputs, **named):
        counted.append(1)
        return model.denoiser(*inputs, **named)

    stated = StatedSteps(COMPUTED)
    model.sample(Reusable(denoiser, stated), [1, 2], steps=steps, solver=solver)
    assert len(counted) == calls and bool(stated.asked) == (solver != "heun")


# Pipelines --------------------------------------------------------------------------------------------------------------------


def run_pipeline(
    scheduler,
    steps: PipelineSteps,
    denoiser,
    *,
    start=0,
    calls=1,
    passes=lambda t: t,
    context=None,
    view=True,
    dtype=None,
    eta=0.0,
):
    """Acts like a pipeline of diffusers: one or several calls for each of the scheduler's timesteps."""
    x = torch.zeros(2, 4)
    for index, t in enumerate(scheduler.timesteps[start:]):
        passed = t.expand(2) if view else (t.expand(2).to(dtype) / 1000).clone() * 1000
        for call in range(calls):
            name = context[call] if context else None
            timestep = passes(passed.float())
            steps.see(scheduler, passed, timestep, eta)
            steps.prediction(name, denoiser, {"x": x, "timestep": timestep, "slope": 1.0 + call})
        if hasattr(scheduler, "_step_index"):
            scheduler._step_index = start + index + 1


class Named(Line):
    def __call__(self, x, timestep, slope=1.0):
        found = super().__call__(x, timestep, slope)
        self.slopes = [*getattr(self, "slopes", []), slope]
        return found


def pipeline_steps(name: str, count: int = 5, **config):
    scheduler = getattr(schedulers, name)(**config)
    scheduler.set_timesteps(count)
    if name == "FlowMatchEulerDiscreteScheduler":
        scheduler.set_begin_index(0)  # as its pipelines do
    return scheduler, PipelineSteps(StatedSteps(COMPUTED), "Model2D")


FIRST_ORDER = [
    "DDIMScheduler",
    "EulerDiscreteScheduler",
    "DPMSolverMultistepScheduler",
    "UniPCMultistepScheduler",
    "FlowMatchEulerDiscreteScheduler",
    "LMSDiscreteScheduler",
    "DEISMultistepScheduler",
]


@pytest.mark.parametrize("name", FIRST_ORDER)
def test_schedulers_tell_where_a_call_lies(name, recwarn):
    scheduler, steps = pipeline_steps(name)
    line = Named()
    run_pipeline(scheduler, steps, line)
    times = [float(t) for t in scheduler.timesteps]
    assert line.seen == pytest.approx([times[0], times[1], times[4]]) and not [
        w for w in recwarn.list if "all steps" in str(w.message)
    ]
    scheduler.set_timesteps(5)  # another image
    run_pipeline(scheduler, steps, line)
    assert line.seen[3:] == pytest.approx(line.seen[:3])


def test_an_image_that_failed_in_its_first_step_costs_the_next_one_nothing():
    scheduler, steps = pipeline_steps("DDIMScheduler")

    def fails(**_) -> Tensor:
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError):
        run_pipeline(scheduler, steps, fails)
    scheduler.set_timesteps(5)
    run_pipeline(scheduler, steps, line := Named())
    times = [float(t) for t in scheduler.timesteps]
    assert line.seen == pytest.approx([times[0], times[1], times[4]])


def test_a_scheduler_that_replaces_another_is_followed():
    """As by `pipe.scheduler = DPMSolverMultistepScheduler.from_config(pipe.scheduler.config)`, also for one that adds noise."""
    names = ["EulerDiscreteScheduler", "DDPMScheduler", "DPMSolverMultistepScheduler"]
    (first, _), (noisy, _), (last, _) = map(pipeline_steps, names)
    steps = PipelineSteps(StatedSteps(COMPUTED), "Model2D")
    for scheduler, computed in ((first, 3), (noisy, 5), (last, 3)):
        line = Named()
        if scheduler is noisy:
            with pytest.warns(RuntimeWarning, match="DDPMScheduler is not known"):
                run_pipeline(scheduler, steps, line)
        else:
            run_pipeline(scheduler, steps, line)
        assert len(line.seen) == computed


@pytest.mark.parametrize("begins", [True, False])
@pytest.mark.parametrize("name", ["FlowMatchEulerDiscreteScheduler", "DDIMScheduler"])
def test_timesteps_that_are_computed_with_are_found_by_index_or_value(name, begins, recwarn):
    """Sana multiplies timesteps, and sets no first step. DDIM counts no steps."""
    scheduler, steps = pipeline_steps(name)
    if not begins:
        scheduler._begin_index = None
    run_pipeline(scheduler, steps, line := Named(), view=False)
    assert len(line.seen) == 3 and not [w for w in recwarn.list if "all steps" in str(w.message)]


@pytest.mark.parametrize(("timestep", "falls"), [(lambda t: 1000 - t, False), (lambda t: t - 1, True)])
def test_timesteps_that_are_counted_otherwise_than_the_schedulers_are_followed(timestep, falls, recwarn):
    """As by Z-Image, and by GLM-Image."""
    scheduler, steps = pipeline_steps("FlowMatchEulerDiscreteScheduler")
    steps._reuse = stated = StatedSteps(COMPUTED)
    stated.timesteps_fall = falls
    run_pipeline(scheduler, steps, line := Named(), view=False, passes=timestep)
    times = [float(timestep(t)) for t in scheduler.timesteps]
    assert line.seen == pytest.approx([times[0], times[1], times[4]])
    assert stated.asked == [pytest.approx(tuple(times), abs=1.01)]
    assert not [w for w in recwarn.list if "all steps" in str(w.message)]


def test_threads_follow_trajectories_of_their_own():
    """Two pipelines share a model, each in its thread. Their calls take turns, and change their order."""
    (first, steps), (second, _) = (pipeline_steps("DDIMScheduler") for _ in range(2))
    lines, turns = (Line(), Line()), [threading.Event() for _ in range(10)]
    order = [0, 1, 1, 0, 0, 1, 1, 0, 0, 1]
    found: dict[int, list[Tensor]] = {0: [], 1: []}

    def draw(mine: int) -> None:
        places = [place for place, of in enumerate(order) if of == mine]
        for t, place in zip((first, second)[mine].timesteps, places, strict=True):
            assert place == 0 or turns[place - 1].wait(10)
            steps.see((first, second)[mine], t, t.expand(2).float())
            named = {"x": torch.zeros(2, 4), "timestep": t.expand(2).float(), "slope": 1.0 + mine}
            found[mine].append(steps.prediction(None, lines[mine], named))
            turns[place].set()

    threads = [threading.Thread(target=draw, args=(mine,)) for mine in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    for mine in (0, 1):
        assert len(lines[mine].seen) == 3
        for t, prediction in zip(first.timesteps, found[mine], strict=True):
            expected = Line()(torch.zeros(2, 4), t.expand(2).float(), slope=1.0 + mine)
            torch.testing.assert_close(prediction, expected, rtol=1e-6, atol=1e-2)


def test_noise_of_a_call_is_computed():
    scheduler, steps = pipeline_steps("DDIMScheduler")
    with pytest.warns(RuntimeWarning, match=r"DDIMScheduler adds noise with eta: 0\.5; remedy: leave eta out"):
        run_pipeline(scheduler, steps, line := Named(), eta=0.5)
    assert len(line.seen) == 5
    run_pipeline(scheduler, steps, line := Named())
    assert len(line.seen) == 3


def test_timesteps_of_tokens_are_computed():
    scheduler, _ = pipeline_steps("UniPCMultistepScheduler")
    steps = PipelineSteps(StatedSteps(COMPUTED), "Model2D", of_tokens=True)
    with pytest.warns(RuntimeWarning, match="timestep for each token or frame"):
        run_pipeline(scheduler, steps, line := Named())
    assert len(line.seen) == 5


@pytest.mark.parametrize("start", [0, 1])
def test_timesteps_in_the_type_of_the_latents_are_the_schedulers(start, recwarn):
    """FluxPipeline passes them so, divided by 1000: in BF16 750.25 becomes 752."""
    scheduler, steps = pipeline_steps("FlowMatchEulerDiscreteScheduler", 5 + start)
    scheduler.set_begin_index(start)
    run_pipeline(scheduler, steps, line := Named(), start=start, view=False, dtype=torch.bfloat16)
    assert len(line.seen) == 3 and not [w for w in recwarn.list if "all steps" in str(w.message)]


@pytest.mark.parametrize("calls", [1, 2])
def test_guidance_inside_leaves_steps_out(calls):
    """Both halves in one call of the pipeline or in two; the denoiser's guided sum is extrapolated."""
    guidance = FusedGuidance(GuidanceRecord(scale="s", negative={"c": "negative_c"}), ("batch", 4))
    computed: list[float] = []

    def engine(*, x: Tensor, t: Tensor, c: Tensor, negative_c: Tensor, s: Tensor) -> Tensor:
        computed.append(float(t[0]))
        return x + (t / 1000 + negative_c + s * (c - negative_c))[:, None]

    scheduler, steps = pipeline_steps("DDIMScheduler")
    halves = Halves(engine, "t", guidance, "Model2D", lambda **named: steps.prediction(None, engine, named))
    x, c = torch.zeros(2, 4), torch.tensor([1.0, 2.0, 3.0, 5.0])
    for t in scheduler.timesteps:
        parts = [(torch.cat([x, x]), c)] if calls == 1 else [(x, c[:2]), (x, c[2:])]
        predictions = []
        for rows, of_rows in parts:
            timestep = t.expand(len(rows))
            steps.see(scheduler, timestep, timestep.float())
            predictions.append(halves.prediction({"x": rows, "t": timestep.float(), "c": of_rows}, rows, timestep))
        u, conditional = predictions[0].chunk(2) if calls == 1 else predictions
        expected = (t / 1000 + c[:2] + 7 * (c[2:] - c[:2]))[:, None].expand(2, 4)
        torch.testing.assert_close(u + 7 * (conditional - u), expected, rtol=1e-5, atol=1e-4)
    times = [float(t) for t in scheduler.timesteps]
    assert computed == [times[0], times[1], times[4]]


@pytest.mark.parametrize("context", [None, ("cond", "uncond")])
def test_two_calls_a_step_are_two_trajectories(context):
    scheduler, steps = pipeline_steps("UniPCMultistepScheduler")
    line = Named()
    run_pipeline(scheduler, steps, line, calls=2, context=context)
    assert line.slopes == [1.0, 2.0] * 3


def test_the_timestep_of_the_loop_tells_the_step_of_a_computed_one(monkeypatch):
    """A scheduler without a count of steps: only the first timestep of an image is read, which waits for the device."""
    scheduler, steps = pipeline_steps("DDIMScheduler")
    read = []
    checked = steps._checked
    monkeypatch.setattr(steps, "_checked", lambda step, timestep: read.append(step) or checked(step, timestep))
    line = Line()
    for t in scheduler.timesteps:
        passed = t.expand(2) * 1.0
        steps.see(scheduler, passed, passed, of_loop=t)
        steps.prediction(None, line, {"x": torch.zeros(2, 4), "timestep": passed})
    assert read == [0] and len(line.seen) == 3


def test_an_image_that_starts_in_the_middle():
    scheduler, steps = pipeline_steps("DDIMScheduler", 8)
    steps._reuse = stated = StatedSteps(COMPUTED)
    line = Named()
    run_pipeline(scheduler, steps, line, start=3)
    times = [float(t) for t in scheduler.timesteps[3:]]
    assert stated.asked == [tuple(times)] and line.seen == pytest.approx([times[0], times[1], times[4]])


@pytest.mark.parametrize(
    ("name", "config", "why"),
    [
        ("EulerAncestralDiscreteScheduler", {}, "not known to call the model once a step"),
        ("DDPMScheduler", {}, "not known"),
        ("HeunDiscreteScheduler", {}, "not known"),
        ("LCMScheduler", {}, "not known"),
        ("DPMSolverMultistepScheduler", {"algorithm_type": "sde-dpmsolver++"}, "adds noise with algorithm_type"),
        ("FlowMatchEulerDiscreteScheduler", {"stochastic_sampling": True}, "adds noise with stochastic_sampling"),
        ("PNDMScheduler", {"skip_prk_steps": False}, "four times in each of its first steps with skip_prk_steps"),
    ],
)
def test_schedulers_that_add_noise_are_computed(name, config, why):
    scheduler, steps = pipeline_steps(name, **config)
    with pytest.warns(RuntimeWarning, match=why):
        run_pipeline(scheduler, steps, line := Named())
    assert len(line.seen) == len(scheduler.timesteps)


def test_models_that_are_given_other_timesteps_are_computed():
    scheduler, steps = pipeline_steps("DDIMScheduler")
    with pytest.warns(RuntimeWarning, match="timesteps are not those of the DDIMScheduler"):
        run_pipeline(scheduler, steps, line := Named(), passes=lambda t: t * 0.5)
    assert len(line.seen) == 5


def test_a_timestep_that_is_visited_twice_is_computed():
    """PNDM repeats timesteps; a schedule of such timesteps skips no step."""
    scheduler = schedulers.PNDMScheduler(skip_prk_steps=True)
    scheduler.set_timesteps(5)
    times = torch.linspace(999, 0, 20, dtype=torch.float64)
    products = torch.eye(20, dtype=torch.float64)[None]
    found = Trajectories(times, products, torch.ones_like(times), torch.ones_like(times), False)
    steps = PipelineSteps(Reuse(found, "mean", 1e9), "Model2D")
    run_pipeline(scheduler, steps, line := Named())
    assert len(line.seen) == len(scheduler.timesteps)
