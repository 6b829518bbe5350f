"""Training on samples with images: log-probs and gradients are those of transformers, in every layout those of one rank."""

import copy
import json
import shutil
from types import SimpleNamespace

import pytest
import torch

from slime.utils.errors import UserError
from slime.weights.hf_reader import FUSED_EXPERTS, fused_ending
from tests.support.models.seen_batch import (
    BEGIN,
    DEEP_PROVIDER,
    END,
    IMAGE,
    PROVIDER,
    features_of,
    make_seen_samples,
    processed,
    seen_alone,
    write_seeing_model,
)
from tests.support.models.tiny_families import LAYOUTS
from tests.support.processes.distributed import run_distributed
from tests.support.processes.family_checks import of_trained_parts
from tests.support.processes.layout_steps import assert_equal_runs, layout_args, train_steps

# A sample with two images is longer than a micro-batch of the batch without them.
FLAGS = {"max_tokens_per_gpu": 32, "custom_model_provider_path": PROVIDER}
DEEP_FLAGS = {**FLAGS, "custom_model_provider_path": DEEP_PROVIDER}
FLAGS_OF = {"qwen3_5": FLAGS, "qwen3_5_moe": FLAGS, "qwen3_vl": DEEP_FLAGS, "qwen3_vl_moe": DEEP_FLAGS}
# D11: of texts (0, 1) and samples with one image (2, 5: the same) or two (7), in either order.
ORDERS = ((0, 2, 7), (0, 2), (2, 0), (7, 1, 5, 2), (0, 1))


@pytest.fixture(scope="module", params=["qwen3_5", "qwen3_vl"])
def seeing(request, tmp_path_factory):
    """Directory, model in transformers, and flags."""
    directory = tmp_path_factory.mktemp("seeing")
    return directory, write_seeing_model(directory, request.param), FLAGS_OF[request.param]


def some_samples(order):
    samples = {sample.index: sample for sample in make_seen_samples()}
    return [samples[index] for index in order]


def generated_a_placeholder():
    """A sample with an image, whose answer has a placeholder token too."""
    (sample,) = some_samples([2])
    sample.tokens[-2] = IMAGE
    sample.loss_mask = None
    return [sample]


def replied_with_an_image(*, goes_on=True):
    """A sample with an image, whose response has a reply with another one, and goes on."""
    (sample,) = some_samples([2])
    grid = (1, 2, 4)
    reply = [BEGIN, *[IMAGE] * features_of(grid), END]
    sample.loss_mask = list(sample.loss_mask)
    sample.append_response_tokens(tokens=reply[: None if goes_on else -1], trainable=False)
    if goes_on:
        sample.append_response_tokens(tokens=[5, 9, 7], log_probs=[-1.0, -2.0, -1.5])
    first, other = sample.multimodal_train_inputs, processed([grid], 9)
    sample.multimodal_train_inputs = {name: torch.cat([first[name], other[name]]) for name in first}
    return [sample]


def generated_a_placeholder_that_is_not_trained():
    """As where a part of the response is older than the weights."""
    (sample,) = some_samples([2])
    sample.tokens[-4] = IMAGE
    assert sample.loss_mask == [1, 1, 0, 0, 1, 1]
    return [sample]


def replied_with_an_image_behind_a_placeholder_that_is_not_trained():
    """As where the model has written one in a turn that is masked, and an environment has shown an image then."""
    (sample,) = replied_with_an_image()
    assert sample.loss_mask[:4] == [1, 1, 0, 0]
    sample.tokens[2 - sample.response_length] = IMAGE
    sample.metadata["generated_and_masked"] = [2]
    return [sample]


def begins_and_ends_with_an_image():
    (sample,) = replied_with_an_image(goes_on=False)
    sample.tokens = sample.tokens[sample.tokens.index(IMAGE) :]
    assert sample.tokens[0] == sample.tokens[-1] == IMAGE
    return [sample]


OWN = {
    "at both ends": begins_and_ends_with_an_image,
    "generated": generated_a_placeholder,
    "generated and masked": generated_a_placeholder_that_is_not_trained,
    "replied": replied_with_an_image,
    "generated, masked and replied": replied_with_an_image_behind_a_placeholder_that_is_not_trained,
}


class OneMicroBatch:
    """A model of one rank, and the data of `samples` as a single micro-batch."""

    def __init__(self, args):
        from tests.support.processes.megatron_worker import load_backend

        self.args, self.backend = args, load_backend(args)

    def data(self, samples):
        from slime.scheduling.dp_schedule import DPSchedule
        from slime.training.rollout_batch import build_train_batch, split_for_data_parallel, to_tensors

        rows = list(range(len(samples)))
        batch = build_train_batch(samples, [0.0] * len(rows), [0.0] * len(rows))
        return to_tensors(split_for_data_parallel(batch, DPSchedule([rows], [[rows]], [1], [len(rows)], 0))[0], "cpu")

    def bytes_of_weights(self):
        """Of what gives its memory back while others use the device."""
        return sum(tensor.nbytes for tensor in self.backend.residents().weights)

    def log_probs(self, data):
        from slime.training.train_step import forward_log_probs

        return forward_log_probs(self.args, self.backend, data, with_entropy=False, temperature=1.0)["log_probs"]

    def gradients(self, data):
        """Of the negative sum of all log-probs, by HF names."""
        from slime.backends.megatron_utils.schedules import forward_backward
        from slime.training.train_step import micro_batches
        from tests.support.processes.megatron_worker import hf_gradients

        def loss(batch, logits):
            tokens = batch.stream.next_tokens[batch.stream.predicting_rows.index]
            own = torch.log_softmax(logits, -1).gather(1, tokens[:, None])
            return -own.sum(), {}

        model = self.backend.model
        batches = micro_batches(self.args, data, data["micro_batch_indices"])
        forward_backward(self.args, model, self.backend.optimizer, batches, loss, 1.0)
        kept = [parameter.clone() for parameter in model[0].parameters()]
        found = hf_gradients(self.args, model)
        with torch.no_grad():
            for parameter, value in zip(model[0].parameters(), kept, strict=True):
                parameter.copy_(value)
        return found


def in_one_micro_batch(args):
    """Log-probs and gradients of every order of samples, and of each sample of `OWN`."""
    run = OneMicroBatch(args)
    batches = {order: some_samples(order) for order in ORDERS} | {name: make() for name, make in OWN.items()}
    data = {name: run.data(samples) for name, samples in batches.items()}
    before = run.bytes_of_weights()
    found = {name: (run.log_probs(of_batch), run.gradients(of_batch)) for name, of_batch in data.items()}
    return {**found, "bytes": run.bytes_of_weights() - before}


def in_two_precisions(args):
    """`in_one_micro_batch` in float32, and the log-probs of the first order in bfloat16."""
    exact, rounded = args
    found = in_one_micro_batch(exact)
    run = OneMicroBatch(rounded)
    return found, run.log_probs(run.data(some_samples(ORDERS[0])))


@pytest.fixture(scope="module")
def in_float32_and_16_bits(seeing):
    args = [layout_args(seeing[0], **seeing[2], **flags) for flags in ({}, {"bf16": True})]
    (found,) = run_distributed(in_two_precisions, 1, (args,), timeout=400)
    return found


@pytest.fixture(scope="module")
def packed(in_float32_and_16_bits):
    return in_float32_and_16_bits[0]


def test_the_tower_gives_its_memory_back_with_the_weights(seeing, packed):
    tower = seeing[1].model.visual
    assert packed["bytes"] == sum(tensor.nbytes for tensor in (*tower.parameters(), *tower.buffers()))


def test_bfloat16_stays_near(in_float32_and_16_bits):
    packed, rounded = in_float32_and_16_bits
    differences = torch.cat(rounded) - torch.cat(packed[ORDERS[0]][0])
    assert 0 < differences.abs().mean() < 0.03


@pytest.mark.parametrize("name", [*ORDERS, *OWN])
def test_d11_texts_and_images_in_one_micro_batch_are_what_each_is_alone(seeing, packed, name):
    assert_what_each_is_alone(seeing[1], OWN[name]() if name in OWN else some_samples(name), packed[name])


def assert_what_each_is_alone(model, samples, found_together):
    model.zero_grad()
    log_probs, gradients = found_together
    for sample, found in zip(samples, log_probs, strict=True):
        rows = torch.log_softmax(seen_alone(model, sample), -1)[:-1]
        expected = rows.gather(1, torch.tensor(sample.tokens[1:])[:, None])[-sample.response_length :, 0]
        (-expected.sum()).backward()
        assert (found - expected).abs().max() <= 1e-5, sample.index
    of_model = {}
    for name, parameter in model.named_parameters():
        for expert, matrix in enumerate(parameter.grad if ".experts." in name else ()):
            parts = FUSED_EXPERTS[fused_ending(name)]
            layer = name.removesuffix(fused_ending(name))
            names = [f"{layer}.experts.{expert}.{part}" for part in parts]
            of_model |= dict(zip(names, matrix.chunk(len(parts)), strict=True))
        if ".experts." not in name:
            of_model[name] = parameter.grad
    assert set(of_trained_parts(of_model)) == set(gradients)
    for tensor, gradient in gradients.items():
        scale = max(float(of_model[tensor].abs().max()), 1e-3)
        assert (gradient - of_model[tensor]).abs().max() <= 5e-5 * scale, tensor


# Of the four layers of Qwen3-VL three get features: both stages have some, and look at images.
PIPELINE = LAYOUTS["pp2"]
TWO_RANKS = {name: LAYOUTS[name] for name in ("tp2", "tp2 whole sequence", "pp2", "cp2", "cp2 gathered")}
TWO_RANKS["pp2 recomputed"] = {**PIPELINE, **LAYOUTS["recomputed"]}
VIRTUAL = {"virtual stages": {**PIPELINE, "virtual_pipeline_model_parallel_size": 2}}
# Those of every change. Features of an image find their rows by the same lines in both models, so that one model is enough for
# a layout: where ranks have other rows or other layers, that whose layers get features too.
OF_DEEP, OF_OTHER = ("tp2", "pp2", "cp2", "virtual stages"), ("tp2 whole sequence", "cp2 gathered", "pp2 recomputed")


@pytest.fixture(scope="module")
def one_rank(seeing):
    """`train_steps` on one rank, as it is and with layers that are recomputed."""
    cases = {
        name: layout_args(seeing[0], **{**seeing[2], **sizes})
        for name, sizes in {"one": {}, "recomputed": LAYOUTS["recomputed"]}.items()
    }
    (found,) = run_distributed(train_steps, 1, (cases, make_seen_samples), timeout=400)
    return found


def test_layers_that_are_recomputed_see_the_same(one_rank):
    assert_equal_runs([one_rank["recomputed"]], one_rank["one"])


def test_layouts_train_on_images_as_one_rank_does(seeing, one_rank):
    assert_trained_like_one(seeing, one_rank, OF_DEEP if seeing[2] is DEEP_FLAGS else OF_OTHER)


@pytest.mark.slow
def test_every_other_layout_trains_on_images_as_one_rank_does(seeing, one_rank):
    done = OF_DEEP if seeing[2] is DEEP_FLAGS else OF_OTHER
    assert_trained_like_one(seeing, one_rank, [name for name in TWO_RANKS if name not in done])


def assert_trained_like_one(seeing, one_rank, names):
    layouts = {name: sizes for name, sizes in {**TWO_RANKS, **VIRTUAL}.items() if name in names}
    cases = {name: layout_args(seeing[0], **{**seeing[2], **sizes}) for name, sizes in layouts.items()}
    ranks = run_distributed(train_steps, 2, (cases, make_seen_samples), timeout=400)
    for name in layouts:
        assert_equal_runs([rank[name] for rank in ranks], one_rank["one"])


@pytest.mark.slow
def test_layouts_of_four_ranks_train_on_images_as_one_rank_does(seeing, one_rank):
    layouts = {"tp2 pp2": LAYOUTS["tp2 pp2"], "cp2 pp2": {**PIPELINE, **LAYOUTS["cp2"]}}
    cases = {name: layout_args(seeing[0], **{**seeing[2], **sizes}) for name, sizes in layouts.items()}
    ranks = run_distributed(train_steps, 4, (cases, make_seen_samples), timeout=400)
    for name in layouts:
        assert_equal_runs([rank[name] for rank in ranks], one_rank["one"])


@pytest.mark.parametrize("model_type", ["qwen3_5_moe", "qwen3_vl_moe"])
def test_of_a_mixture_of_experts_texts_and_images_are_what_each_is_alone(tmp_path, model_type):
    model = write_seeing_model(tmp_path, model_type)
    (found,) = run_distributed(in_one_micro_batch, 1, (layout_args(tmp_path, **FLAGS_OF[model_type]),), timeout=400)
    for order in ORDERS:
        assert_what_each_is_alone(model, some_samples(order), found[order])


@pytest.mark.slow
@pytest.mark.parametrize("model_type", ["qwen3_5_moe", "qwen3_vl_moe"])
def test_a_mixture_of_experts_trains_on_images(tmp_path, model_type):
    flags = FLAGS_OF[model_type]
    write_seeing_model(tmp_path, model_type)
    (one,) = run_distributed(train_steps, 1, ({"one": layout_args(tmp_path, **flags)}, make_seen_samples), timeout=400)
    layouts = ("tp2", "ep2", "pp2", "cp2")
    cases = {name: layout_args(tmp_path, **{**flags, **LAYOUTS[name]}) for name in layouts}
    ranks = run_distributed(train_steps, 2, (cases, make_seen_samples), timeout=400)
    for name in layouts:
        assert_equal_runs([rank[name] for rank in ranks], one["one"])


def told(args, samples):
    """What is said of each case's sample, by name."""
    found = {}
    run = None
    for name, sample in samples.items():
        if name in args:
            run = None
        try:
            run = run or OneMicroBatch(args.get(name, args["any"]))
            run.log_probs(run.data([sample]))
            found[name] = "nothing"
        except UserError as error:
            found[name] = str(error)
        if name in args:
            run = None
    return found


def test_what_does_not_go_together_is_told_with_the_sample(tmp_path):
    directory = tmp_path / "seeing"
    write_seeing_model(directory)
    (sample,) = some_samples([7])
    cases = {
        name: copy.deepcopy(sample)
        for name in ("fits", "lacks", "apart", "pixels", "grids", "video", "text", "blind", "predicts")
    }
    cases["lacks"].tokens.remove(IMAGE)
    place = cases["apart"].tokens.index(IMAGE)
    cases["apart"].tokens[place : place + 3] = [IMAGE, 1, IMAGE]
    del cases["pixels"].multimodal_train_inputs["image_grid_thw"]
    cases["grids"].multimodal_train_inputs["image_grid_thw"] = processed([(1, 2, 4)], 0)["image_grid_thw"]
    cases["video"].multimodal_train_inputs["pixel_values_videos"] = torch.zeros(4, 12)
    shutil.copytree(directory, tmp_path / "blind")
    of_tower = json.loads((directory / "config.json").read_text())
    of_tower["vision_config"]["depth"] = 3
    (tmp_path / "blind" / "config.json").write_text(json.dumps(of_tower))
    args = {
        "any": layout_args(directory, **FLAGS),
        "text": layout_args(directory),
        "blind": layout_args(tmp_path / "blind", **FLAGS),
        "predicts": layout_args(
            directory, **FLAGS, mtp_num_layers=1, enable_mtp_training=True, multimodal_keys={"image": "images"}
        ),
    }
    (found,) = run_distributed(told, 1, (args, cases), timeout=400)
    said = {
        "fits": "nothing",
        "lacks": f"sample 7: it has 4 placeholder tokens of images (id {IMAGE})",
        "apart": "sample 7: between the 2 placeholder tokens of its image 0 stand others",
        "pixels": "sample 7: its multimodal_train_inputs have no image_grid_thw",
        "grids": "sample 7: its pixel_values are of 20 patches, and its image_grid_thw has 8",
        "video": "sample 7: the sample has videos",
        "text": "samples [7] have images, and the model that --custom-model-provider-path builds takes none",
        "blind": "its config tells of a vision tower with",
        # Before any come.
        "predicts": "--enable-mtp-training: layers for multi-token prediction are trained on tokens alone",
    }
    assert {name: said[name] in message for name, message in found.items()} == dict.fromkeys(said, True), found


def test_attention_that_finds_positions_by_itself_takes_no_images():
    from slime_plugins.models.sight import Sight

    model = torch.nn.Module()
    model.rotary_pos_emb, model.pre_process = torch.nn.Module(), False
    model.decoder = SimpleNamespace(layers=[])
    Sight(SimpleNamespace(multimodal_keys=None), model, (11, 11, 10))
    with pytest.raises(UserError, match="Transformer Engine's attention .* give --transformer-impl local"):
        Sight(SimpleNamespace(multimodal_keys={"image": "images"}), model, (11, 11, 10))


@pytest.mark.parametrize("shapes", [[], [(1, 2, 3)], [(1, 1, 1), (1, 4, 2)], [(2, 3, 2), (1, 2, 5), (1, 1, 4)]])
def test_positions_are_those_of_transformers(seeing, shapes):
    import math

    from slime_plugins.models.sight import image_positions

    _, model, _ = seeing
    kinds = [0, 0]
    places = []
    for shape in shapes:
        places += range(len(kinds), len(kinds) + math.prod(shape))
        kinds += [1] * math.prod(shape) + [0] * len(kinds)
    grids = torch.tensor([(t, 2 * h, 2 * w) for t, h, w in shapes]) if shapes else None
    expected, _ = model.model.get_rope_index(torch.zeros(1, len(kinds)).long(), torch.tensor([kinds]), grids)
    assert image_positions(len(kinds), places, shapes).equal(expected[:, 0])


def places_of_images(prompt, response, counts):
    """Where `_Images` finds images of these many features; "i" is a placeholder, "I" one that is trained, "." another token."""
    from slime_plugins.models.sight import _Images

    config = SimpleNamespace(image_token_id=9, vision_config=SimpleNamespace(spatial_merge_size=1))
    tokens = torch.tensor([9 if token in "iI" else 1 for token in prompt + response])
    grids = torch.tensor([(1, 1, count) for count in counts])
    inputs = {"pixel_values": torch.zeros(sum(counts), 3), "image_grid_thw": grids}
    return _Images(inputs, tokens, torch.tensor([token == "I" for token in response]), config).places.tolist()


@pytest.mark.parametrize(
    ("prompt", "response", "counts", "places"),
    [
        (".ii.", ".i.", [2], [1, 2]),
        (".ii.", ".i.iii.", [2, 3], [1, 2, 7, 8, 9]),
        (".", ".i.iii.i.", [3], [4, 5, 6]),
        (".", ".I.iii.I.", [3], [4, 5, 6]),
        # The turn of the model begins or ends with one, beside what is trained.
        (".", "iI.iii.Ii", [3], [4, 5, 6]),
        # Two images of a reply without anything between them.
        (".", ".ii.iii.", [1, 2], [5, 6, 7]),
        (".", ".i.iii..iii.", [2, 1, 3], [4, 5, 6, 9, 10, 11]),
    ],
)
def test_placeholders_that_the_model_wrote_are_known_by_their_number(prompt, response, counts, places):
    assert places_of_images(prompt, response, counts) == places


@pytest.mark.parametrize(
    ("prompt", "response", "counts"),
    [
        # One of both is the image.
        (".", ".ii..ii.", [2]),
        (".ii.", ".iii..iii.", [2, 3]),
        # None is.
        (".", ".i.i.", [3]),
        (".i.", ".iii.", [2, 3]),
        # They are in another order.
        (".", ".iii.ii.i.", [2, 3]),
    ],
)
def test_placeholders_of_which_it_is_not_known_who_wrote_them_are_told(prompt, response, counts):
    with pytest.raises(UserError, match="placeholder tokens of images .*must be trained .* or the sample left out"):
        places_of_images(prompt, response, counts)
