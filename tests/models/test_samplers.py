"""Samplers with denoisers of known predictions."""

import math

import pytest
import torch
from torch import Tensor

from trtconvert.attention.schedules import NoiseSchedule, ddpm_betas, karras_sigmas
from trtconvert.errors import UserError
from trtconvert.models.parametrisation import SOLVERS, solver_sigmas
from trtconvert.models.samplers import initial_noise, sample, solve_ode

SHAPE = (1, 8, 8)
PREDICTIONS = ("epsilon", "v_prediction", "sample")


@pytest.fixture
def schedule() -> NoiseSchedule:
    return NoiseSchedule(ddpm_betas())


def knows(answer: Tensor, schedule: NoiseSchedule, prediction: str):
    """The perfect denoiser of a data set of one image, x₀ = `answer`, in any parametrisation."""

    def denoiser(x: Tensor, timestep: Tensor) -> Tensor:
        sigma = schedule.sigma(timestep)[:, None, None, None]
        signal = (1 + sigma**2).rsqrt()
        noise = (x - signal * answer) / (signal * sigma)
        return {"epsilon": noise, "sample": answer, "v_prediction": signal * noise - signal * sigma * answer}[
            prediction
        ]

    return denoiser


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("prediction", PREDICTIONS)
def test_a_denoiser_that_knows_the_answer_gives_it(schedule, solver, prediction):
    noise = initial_noise(range(3), SHAPE).double()
    answer = torch.rand(3, *SHAPE, generator=torch.Generator().manual_seed(1), dtype=torch.float64) * 2 - 1
    images = sample(
        knows(answer, schedule, prediction), noise, schedule, prediction=prediction, solver=solver, steps=10
    )
    torch.testing.assert_close(images, ((answer + 1) / 2).float(), rtol=0, atol=1e-5)


def gaussian_error(steps: int, second_order: bool) -> float:
    """Error of the solver for data N(0, 0.5²), whose flow is x(σ) = x(σ₀)·√((0.25 + σ²)/(0.25 + σ₀²))."""
    start, end = 20.0, 0.1
    x = torch.ones(1, dtype=torch.float64)
    found = solve_ode(
        lambda x, sigma: x * 0.25 / (0.25 + sigma**2), x, karras_sigmas(steps + 1, end, start), second_order
    )
    return abs(found.item() - math.sqrt((0.25 + end**2) / (0.25 + start**2)))


@pytest.mark.parametrize(("second_order", "order"), [(False, 1), (True, 2)])
def test_the_solvers_converge_with_their_order(second_order, order):
    for steps in (40, 80):
        gain = gaussian_error(steps, second_order) / gaussian_error(2 * steps, second_order)
        assert math.log2(gain) == pytest.approx(order, abs=0.2)


def test_heun_makes_its_last_step_with_euler(schedule):
    calls = []
    answer = torch.zeros(1, *SHAPE)
    sample(
        knows(answer, schedule, "epsilon"),
        initial_noise([0], SHAPE),
        schedule,
        prediction="epsilon",
        solver="heun",
        steps=6,
        on_call=calls.append,
    )
    assert [call.index for call in calls] == list(range(11))
    # Levels between the first and the last are visited twice: at the end of a step and at the start of the next.
    timesteps = [call.timestep.item() for call in calls]
    assert timesteps[1:11:2] == timesteps[2:11:2]
    assert timesteps == sorted(timesteps, reverse=True)


def test_noise_belongs_to_the_sample_and_not_to_the_batch():
    together = initial_noise(range(10), SHAPE, seed=3)
    apart = torch.cat([initial_noise(range(4), SHAPE, seed=3), initial_noise(range(4, 10), SHAPE, seed=3)])
    assert torch.equal(together, apart)
    others = initial_noise(range(10), SHAPE, seed=4)
    rows = torch.cat([together, others]).flatten(1)
    assert len(torch.unique(rows, dim=0)) == 20


def test_noise_is_standard_normal():
    noise = initial_noise(range(500), (3, 16, 16))
    assert noise.mean().abs() < 0.01
    assert noise.std().item() == pytest.approx(1, abs=0.01)
    # Neighbouring seeds give independent noise.
    assert (noise[:-1] * noise[1:]).mean().abs() < 0.01


def test_ddim_visits_the_noisiest_timestep_first(schedule):
    timesteps = schedule.timestep(solver_sigmas(schedule, "ddim", 50)).round()
    assert timesteps.tolist() == list(range(999, 0, -20))  # diffusers, timestep_spacing="trailing"


@pytest.mark.parametrize("solver", ["euler", "heun"])
def test_karras_levels_stay_within_the_models_noise(schedule, solver):
    sigmas = solver_sigmas(schedule, solver, 20)
    assert sigmas[0].item() == pytest.approx(80)
    assert sigmas[-1].item() == pytest.approx(schedule.sigmas[0].item())
    stable_diffusion = NoiseSchedule(ddpm_betas(1000, "scaled_linear"))
    assert solver_sigmas(stable_diffusion, solver, 20)[0].item() == pytest.approx(14.6146, rel=1e-5)


def test_guidance_extrapolates_from_the_unconditional_prediction(schedule):
    """The denoiser predicts its condition's value, so that guidance 2 from 0.1 towards 0.3 must end at 0.5."""

    def denoiser(x: Tensor, timestep: Tensor, value: Tensor) -> Tensor:
        return value[:, None, None, None].expand_as(x)

    noise = initial_noise(range(2), SHAPE)
    calls = []
    images = sample(
        denoiser,
        noise,
        schedule,
        prediction="sample",
        steps=3,
        conditions={"value": torch.tensor([0.3, -0.3])},
        null_conditions={"value": torch.tensor([0.1, -0.1])},
        guidance=2.0,
        on_call=calls.append,
    )
    torch.testing.assert_close(images[:, 0, 0, 0], torch.tensor([0.75, 0.25]))
    assert len(calls) == 3
    assert calls[0].x.shape == (4, *SHAPE)
    torch.testing.assert_close(calls[0].conditions["value"], torch.tensor([0.1, -0.1, 0.3, -0.3]))


def test_images_are_clamped(schedule):
    images = sample(
        lambda x, t: torch.full_like(x, 7.0), initial_noise([0], SHAPE), schedule, prediction="sample", steps=2
    )
    assert images.max() == 1 and images.dtype == torch.float32


@pytest.mark.parametrize(
    "change",
    [
        {"solver": "dpm"},
        {"steps": 0},
        {"steps": 1001},
        {"prediction": "v"},
        {"guidance": 2.0, "conditions": {"label": torch.zeros(1)}},
        {"guidance": 2.0},
        {"guidance": None},
        {"guidance": torch.tensor([1.0, 2.0])},
    ],
)
def test_bad_arguments_are_refused_with_a_remedy(schedule, change):
    with pytest.raises(UserError) as caught:
        sample(lambda x, t, **_: x, initial_noise([0], SHAPE), schedule, **{"prediction": "sample"} | change)
    assert caught.value.expected and caught.value.got and caught.value.remedy
