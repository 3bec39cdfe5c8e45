"""Metrics against closed forms and other libraries."""

import functools
import itertools

import pytest
import torch
from scipy.linalg import sqrtm
from tolerances import EIGENVALUES, SAME_DOUBLE
from torch import nn

from trtconvert.errors import UserError
from trtconvert.evaluate import metrics
from trtconvert.evaluate.features import Features, load_extractor, load_state
from trtconvert.evaluate.metrics import Moments, merged
from trtconvert.evaluate.optional import require


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


class Pixels(nn.Module):
    """An extractor that returns its input, for libraries that require one."""

    num_features = 6

    def forward(self, x):
        return x


def gaussian(mean, covariance, count=100):
    return Moments(count, torch.as_tensor(mean).double(), torch.as_tensor(covariance).double() * (count - 1))


# Moments and Fréchet's distance


def test_merged_moments_are_those_of_the_whole_set():
    features = normal(101, 5) * 3 + 1000  # a mean far from 0 is where sums of squares would lose digits
    parts = merged(Moments.of(part) for part in features.split([1, 40, 7, 53]))
    assert parts.count == 101
    torch.testing.assert_close(parts.mean, features.mean(0), rtol=SAME_DOUBLE, atol=0)
    torch.testing.assert_close(parts.covariance(), features.T.cov(), rtol=1e4 * SAME_DOUBLE, atol=0)


def test_distance_of_two_axis_aligned_gaussians():
    one = gaussian([0.0, 1.0, 2.0], torch.diag(torch.tensor([1.0, 4.0, 9.0])))
    other = gaussian([0.5, 1.0, 0.0], torch.diag(torch.tensor([4.0, 1.0, 9.0])))
    expected = 0.5**2 + 2**2 + (1 - 2) ** 2 + (2 - 1) ** 2
    assert metrics.frechet_distance(one, other) == pytest.approx(expected, rel=EIGENVALUES)


def test_distance_of_gaussians_that_do_not_commute():
    a, b = normal(4, 4), normal(4, 4, seed=1)
    a, b = a @ a.T, b @ b.T
    expected = 4 * 0.25 + float(a.trace() + b.trace()) - 2 * sqrtm((a @ b).numpy()).trace().real
    got = metrics.frechet_distance(gaussian([0.0] * 4, a), gaussian([0.5] * 4, b))
    assert got == pytest.approx(expected, rel=EIGENVALUES)


def test_a_set_is_at_no_distance_from_itself():
    moments = Moments.of(normal(500, 6))
    assert metrics.frechet_distance(moments, moments) == pytest.approx(0, abs=EIGENVALUES)


def test_fid_is_torchmetrics():
    image = pytest.importorskip("torchmetrics.image.fid")
    one, other = normal(300, 6), normal(200, 6, seed=1) * 1.3 + 0.2
    metric = image.FrechetInceptionDistance(Pixels(), normalize=True, input_img_size=(6,)).set_dtype(torch.float64)
    metric.update(one, real=True)
    metric.update(other, real=False)
    got = metrics.frechet_distance(merged(map(Moments.of, one.split(64))), Moments.of(other))
    assert got == pytest.approx(float(metric.compute()), rel=EIGENVALUES)


# Kernel distance, inception score, precision and recall


def test_kernel_distance_is_the_unbiased_estimate():
    one, other = normal(12, 3), normal(12, 3, seed=1) + 0.3

    def k(x, y):
        return (float(x @ y) / 3 + 1) ** 3

    within = [sum(k(x, y) for x, y in itertools.permutations(features, 2)) / (12 * 11) for features in (one, other)]
    between = sum(k(x, y) for x in one for y in other) / 12**2
    mean, std = metrics.kernel_distance(one, other)
    # Subsets as large as the sets: each is the whole, in another order.
    assert mean == pytest.approx(sum(within) - 2 * between, rel=1e-9)
    assert std == pytest.approx(0, abs=1e-9)


def test_kernel_distance_takes_subsets_of_the_smaller_set():
    mean, _ = metrics.kernel_distance(normal(1500, 4), normal(90, 4, seed=1))
    assert abs(mean) < 0.2 < metrics.kernel_distance(normal(1500, 4), normal(90, 4, seed=1) + 1)[0]


def test_inception_score_of_sure_and_of_clueless_classifiers():
    sure = torch.eye(5).repeat(20, 1) * 100
    assert metrics.inception_score(sure) == pytest.approx((5, 0), abs=1e-9)
    assert metrics.inception_score(torch.zeros(100, 5)) == pytest.approx((1, 0), abs=1e-9)


def test_inception_score_is_split_only_when_splits_are_large():
    # Splits of a few samples of two classes would see one class at times, and score below 2.
    assert metrics.inception_score(torch.eye(2).repeat(60, 1) * 100)[1] == 0
    assert metrics.inception_score(torch.eye(2).repeat(1000, 1) * 100)[1] > 0


def test_precision_and_recall_of_a_generator_that_forgot_a_mode():
    cluster = normal(50, 3)
    reference = torch.cat([cluster, cluster + 100])
    assert metrics.precision_recall(cluster * 0.9, reference) == (1.0, pytest.approx(0.5, abs=0.06))
    assert metrics.precision_recall(torch.cat([cluster, cluster + 500]), reference)[0] == pytest.approx(0.5)
    assert metrics.precision_recall(reference, reference) == (1.0, 1.0)
    assert metrics.precision_recall(cluster + 500, reference) == (0.0, 0.0)


@pytest.mark.parametrize("rows", [7, 64, 1024])
def test_precision_and_recall_are_torch_fidelitys(rows, monkeypatch):
    monkeypatch.setattr(metrics, "_ROWS", rows)
    generated, reference = normal(150, 6), normal(201, 6, seed=1) * 1.2 + 0.3
    generated[:20] = reference[5:25]  # samples at no distance, of each other and of themselves
    generated[20:25] = generated[0]
    features = require("torch_fidelity.metric_prc", "torch-fidelity").prc_features_to_metric(
        generated, reference, prc_neighborhood=metrics.NEIGHBOURS, prc_batch_size=1000, save_cpu_ram=True, verbose=False
    )
    found = metrics.precision_recall(generated, reference)
    assert found == pytest.approx((features["precision"], features["recall"]), abs=1e-7)  # means in FP32
    radii = metrics.ball_radii(generated), metrics.ball_radii(reference)
    assert found == metrics.precision_recall(generated, reference, radii)


def test_equal_samples_are_met_whatever_rounding_makes_of_their_distance():
    for seed in range(32):
        flat = normal(1, 64, seed=seed).float().abs() * 3  # features of flat images, as of samples that failed alike
        for generated, reference in ((6, 23), (11, 12), (9, 31)):
            assert metrics.precision_recall(flat.repeat(generated, 1), flat.repeat(reference, 1)) == (1.0, 1.0)


# Pairs of images


@pytest.mark.parametrize("side", [8, 32])
def test_ssim_of_flat_images(side):
    # Without variance, only the luminance term is left: (2ab + c₁) / (a² + b² + c₁), c₁ = 0.01².
    one, other = torch.full((2, 1, side, side), 0.5), torch.full((2, 1, side, side), 0.7)
    expected = (2 * 0.35 + 1e-4) / (0.25 + 0.49 + 1e-4)
    assert metrics.ssim(one, other).tolist() == pytest.approx([expected] * 2, rel=1e-6)
    assert metrics.ssim(one, one).tolist() == pytest.approx([1.0] * 2)


def test_ssim_falls_with_noise_sample_by_sample():
    images = normal(3, 1, 8, 8).sigmoid()
    noise = normal(3, 1, 8, 8, seed=1) * torch.tensor([0.0, 0.05, 0.3])[:, None, None, None]
    clean, little, much = metrics.ssim(images + noise, images).tolist()
    assert clean == pytest.approx(1) and 1 > little > much


def test_lpips_is_torchmetrics(alexnet):
    functional = pytest.importorskip("torchmetrics.functional.image.lpips")
    peer = functional._NoTrainLpips(net="alex", pnet_rand=True)
    state = torch.load(alexnet, weights_only=True)
    peer.net.load_state_dict({n: state["features." + n.partition(".")[2]] for n in peer.net.state_dict()})
    one, other = torch.rand(2, 3, 64, 64), torch.rand(2, 3, 64, 64)
    network = metrics.load_lpips(alexnet)
    with torch.no_grad():
        expected = peer(one, other, normalize=True).flatten()
    torch.testing.assert_close(metrics.lpips(network, one, other).float(), expected, rtol=1e-4, atol=0)
    assert (expected > 0).all()


def test_lpips_of_small_grey_images(alexnet):
    network, images = metrics.load_lpips(alexnet), torch.rand(2, 1, 8, 8)
    assert metrics.lpips(network, images, images).tolist() == [0, 0]
    assert (metrics.lpips(network, images, 1 - images) > 0).all()


def test_lpips_says_which_file_it_wants(tmp_path, alexnet):
    with pytest.raises(UserError, match="alexnet-owt") as error:
        metrics.load_lpips(tmp_path / "missing.pth")
    assert "no such file" in error.value.got and "nothing is downloaded" in error.value.remedy
    other = tmp_path / "other.pth"
    torch.save({"weight": torch.zeros(1)}, other)
    with pytest.raises(UserError, match="does not hold AlexNet's weights"):
        metrics.load_lpips(other)


# Extractors


class Code:
    """An object that a hostile checkpoint would execute."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (open, (str(self.path), "w"))


def test_weights_run_no_code(tmp_path):
    torch.save({"weight": Code(tmp_path / "ran")}, tmp_path / "bad.pth")
    with pytest.raises(UserError, match="cannot read the weights"):
        load_state(tmp_path / "bad.pth", "weights")
    assert not (tmp_path / "ran").exists()


def test_the_shipped_extractor_sees_features_logits_and_maps():
    features = load_extractor("digits-classifier")(torch.rand(3, 1, 8, 8))
    assert {name: tuple(x.shape) for name, x in features.tensors().items()} == {
        "pooled": (3, 64),
        "logits": (3, 10),
        "spatial": (3, 7 * 4 * 4),
    }


@pytest.mark.slow
def test_inception_from_a_file(tmp_path, monkeypatch):
    module = pytest.importorskip("torch_fidelity.feature_extractor_inceptionv3")
    with monkeypatch.context() as patch:  # no weights at hand: the class is let off loading any
        patch.setattr(module, "load_state_dict_from_url", lambda *_, **__: {})
        patch.setattr(module.FeatureExtractorInceptionV3, "load_state_dict", lambda *_: None)
        peer = module.FeatureExtractorInceptionV3("random", ["2048", "logits_unbiased"])
    torch.save(peer.state_dict(), tmp_path / "inception.pth")
    images = torch.randint(0, 256, (2, 1, 8, 8), generator=torch.Generator().manual_seed(0)) / 255
    features = load_extractor("inception", tmp_path / "inception.pth")(images)
    pooled, logits = peer((images * 255).round().byte().expand(-1, 3, -1, -1))
    assert torch.equal(features.pooled, pooled) and torch.equal(features.logits, logits)
    assert features.spatial.shape == (2, 7 * 17 * 17) and features.spatial.std() > 0


def test_inception_is_not_downloaded():
    with pytest.raises(UserError, match="need weights") as error:
        load_extractor("inception")
    assert "--features-weights" in error.value.remedy


def test_a_function_extracts():
    extractor = load_extractor("tiny_features:pixels")
    assert extractor(torch.rand(3, 1, 4, 4)).pooled.shape == (3, 16)
    assert len(extractor.identity) == 64


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("resnet", "there is no feature extractor"),
        ("no_such_module:f", "cannot be imported"),
        ("tiny_features:missing", "cannot be imported"),
    ],
)
def test_extractors_that_do_not_exist(name, message):
    with pytest.raises(UserError, match=message):
        load_extractor(name)


@pytest.mark.parametrize("function", ["a_list", "too_few", "too_few_logits", "a_map"])
def test_functions_that_return_something_else(function):
    with pytest.raises(UserError, match=r"returns the wrong type or size|do not fit") as error:
        load_extractor(f"tiny_features:{function}")(torch.rand(3, 1, 4, 4))
    assert error.value.expected and error.value.remedy


def whole(images):
    return images.flatten(1)


def halved(images):
    return images.flatten(1) / 2


def sulks(images):
    raise KeyError("not today")


a_module = torch.nn.Flatten()
a_partial = functools.partial(whole)


def test_functions_of_one_file_see_different_things():
    """Extractors do not share shards."""
    assert load_extractor("test_metrics:whole").identity != load_extractor("test_metrics:halved").identity
    assert load_extractor("test_metrics:whole").identity == load_extractor("test_metrics:whole").identity


@pytest.mark.parametrize("name", ["a_module", "a_partial"])
def test_any_callable_extracts_features(name):
    extractor = load_extractor(f"test_metrics:{name}")
    assert extractor(torch.rand(3, 1, 4, 4)).pooled.shape == (3, 16)
    assert len(extractor.identity) == 64


@pytest.mark.parametrize(
    ("name", "shape"),
    [("digits-classifier", (3, 8, 8)), ("digits-classifier", (1, 16, 16)), ("test_metrics:sulks", (1, 4, 4))],
)
def test_images_that_an_extractor_does_not_take(name, shape):
    with pytest.raises(UserError, match=f"'{name}' fails on the images") as error:
        load_extractor(name)(torch.rand(2, *shape))
    assert str(list(shape)) in error.value.got and "--features" in error.value.remedy


def test_features_are_rows():
    with pytest.raises(UserError, match="pooled features do not fit"):
        Features(torch.zeros(2, 3, 4))


def test_a_missing_package_is_named():
    with pytest.raises(UserError, match="needs no-such-package") as error:
        require("no_such_package", "no-such-package")
    assert "trtconvert[evaluate]" in error.value.remedy
