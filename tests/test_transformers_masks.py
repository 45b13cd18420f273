"""Masks of Hugging Face models: what transformers would make, without the memory."""

from __future__ import annotations

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")
pytest.importorskip("transformers", "5.16")

from transformers import masking_utils  # noqa: E402
from transformers.masking_utils import causal_mask_function, sdpa_mask  # noqa: E402
from transformers.masking_utils import sliding_window_causal_mask_function as windowed  # noqa: E402

from s2o_cupy.integrations.causal_mask import CausalMask  # noqa: E402
from s2o_cupy.integrations.mask_functions import REASON, causal_mask  # noqa: E402


@settings(deadline=None, max_examples=200)
@given(
    q_length=st.integers(1, 12), seen=st.integers(0, 12), free=st.integers(0, 5), kv_offset=st.integers(0, 4),
    masked=st.sampled_from(["none", "ones", "left", "right", "row", "gap"]), window=st.none() | st.integers(1, 30),
    static=st.booleans(),
)  # fmt: skip
def test_masks_mean_what_sdpas_mean(q_length, seen, free, kv_offset, masked, window, static):
    """Made or not, for any cache: the same keys are visible as in sdpa's mask when that may leave nothing out."""
    assume(q_length > 1 or not free)  # a decoding step in a static cache asks for a mask
    kv_offset = min(kv_offset, seen)
    kv_length = seen + q_length - kv_offset + free
    attention_mask = None if masked == "none" else torch.ones(2, seen + q_length, dtype=torch.bool)
    if masked not in ("none", "ones"):
        hidden = {"left": slice(0, kv_offset + 3), "right": slice(-2, None), "row": slice(0, None), "gap": slice(2, 3)}
        attention_mask[1, hidden[masked]] = False
    arguments = {
        "batch_size": 2, "q_length": q_length, "kv_length": kv_length, "attention_mask": attention_mask,
        "q_offset": torch.tensor(seen) if static else seen, "kv_offset": kv_offset, "local_size": window,
        "mask_function": causal_mask_function if window is None else windowed(window),
    }  # fmt: skip
    made = sdpa_mask(**arguments, allow_is_causal_skip=False)
    found = causal_mask(**arguments)
    keys = seen + q_length - kv_offset
    if found is None:  # as sdpa reads it, and S2O does too
        assert attention_mask is None or attention_mask[:, kv_offset:].all()
        found = CausalMask(2, q_length, kv_length, q_length if q_length > 1 else kv_length, "cpu")
    elif q_length > 1 and masked != "gap":
        assert isinstance(found, CausalMask)  # none in memory
        assert (found.keys, found.window) == (keys, window if window is not None and window < keys else None)
    assert (found.shape, found.dtype) == (made.shape, torch.bool)
    assert torch.equal(found.logical_or(torch.zeros(())), made)
    assert torch.equal(causal_mask(**arguments, allow_is_causal_skip=False), made)


@pytest.mark.parametrize("remaps", [True, False], ids=["remapped", "by masks alone"])
@pytest.mark.parametrize("window", [None, 3])
def test_packed_sequences(window, remaps):
    """As newer versions of transformers pack, and as older ones do."""
    if remaps and not hasattr(masking_utils, "remap_positions_for_packed_sequence"):
        pytest.skip("transformers packs by masks alone")
    positions = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 0], [0, 1, 2, 3, 4, 5, 6, 7, 8]])
    numbers = masking_utils.find_packed_sequence_indices(positions)
    function = causal_mask_function if window is None else windowed(window)
    if remaps:
        function = masking_utils.remap_positions_for_packed_sequence(function, positions)
    function = masking_utils.and_masks(function, masking_utils.packed_sequence_mask_function(numbers))
    arguments = {
        "batch_size": 2, "q_length": 9, "kv_length": 9, "mask_function": function, "local_size": window,
        "allow_is_causal_skip": False,
    }  # fmt: skip
    found = causal_mask(**arguments)
    assert isinstance(found, CausalMask)
    assert found.sequences == ((0, 0, 5), (0, 5, 8), (0, 8, 9), (1, 0, 9))
    assert torch.equal(found.make(), sdpa_mask(**arguments))


def test_what_is_made_says_why():
    """A function that is not known to be causal is never taken for one that is."""
    blocks = masking_utils.blockwise_overlay(torch.tensor([[-1, 0, 0, 0, -1, -1]]))
    sees_all = masking_utils.bidirectional_mask_function
    cases = {
        "chunked attention": masking_utils.chunked_causal_mask_function(4, torch.zeros(1, dtype=torch.long)),
        "mask function": masking_utils.or_masks(causal_mask_function, blocks),
    }
    also = [
        sees_all,
        masking_utils.sliding_window_bidirectional_mask_function(2),
        masking_utils.and_masks(causal_mask_function, masking_utils.sliding_window_overlay(2)),
        masking_utils.and_masks(windowed(2), causal_mask_function),
        lambda b, h, q, k: k <= q,
    ]
    for reason, function in [*cases.items(), *(("mask function", x) for x in also)]:
        arguments = {"batch_size": 1, "q_length": 6, "kv_length": 6, "local_size": 4, "mask_function": function}
        found = causal_mask(**arguments)
        assert type(found) is torch.Tensor and getattr(found, REASON) == reason
        assert torch.equal(found, sdpa_mask(**arguments))
    scattered = torch.tensor([[1, 1, 0, 1, 1, 1]])
    assert getattr(causal_mask(1, 6, 6, attention_mask=scattered), REASON) == "scattered padding"


def test_a_mask_that_is_not_in_memory():
    mask = CausalMask(2, 3, 6, 5, "cpu")
    made = torch.tensor([[1, 1, 1, 0, 0, 0], [1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 0]]).bool().expand(2, 1, 3, 6)
    assert torch.equal(mask.make(), made)
    assert mask.stride() == (0, 0, 0, 0)  # one element
    for same in (mask.contiguous(), mask.to("cpu"), mask.clone(), mask.to(torch.bool), mask.to("meta")):
        assert isinstance(same, CausalMask) and same.keys == 5 and same.shape == made.shape
    assert mask.to("meta").device.type == "meta"
    for computed, expected in (
        (~mask, ~made), (mask & made, made), (mask[:1, :, 1:], made[:1, :, 1:]), (mask.to(torch.float32), made.float()),
        (torch.where(mask, 0.0, -1.0), torch.where(made, 0.0, -1.0)), (mask.mT, made.mT), (mask.data, made),
    ):  # fmt: skip
        assert type(computed) is torch.Tensor
        assert torch.equal(computed, expected)
    q, k = torch.randn(2, 2, 3, 8), torch.randn(2, 2, 6, 8)
    attend = torch.nn.functional.scaled_dot_product_attention
    assert torch.equal(attend(q, k, k, attn_mask=mask), attend(q, k, k, attn_mask=made))
    buffer = torch.empty_like(made)
    buffer.copy_(mask)  # is written, not the mask
    assert torch.equal(buffer, made)
    assert not torch.vmap(torch.clone)(mask).any()  # what does not ask the mask sees its one element
    for write in (lambda: mask.fill_(False), lambda: mask.__setitem__(0, False)):
        with pytest.raises(TypeError, match="would write to a mask that is not in memory"):
            write()
    assert torch.equal(mask.make(), made)


def test_a_mask_elsewhere_means_the_same():
    mask = CausalMask(2, 3, 6, 6, "meta", window=2, sequences=((0, 0, 4), (1, 2, 6))).to("cpu")
    expected = torch.tensor([[[0, 0, 1, 1, 0, 0], [0, 0, 0, 1, 0, 0], [0, 0, 0, 0, 0, 0]],
                             [[0, 0, 1, 1, 0, 0], [0, 0, 0, 1, 1, 0], [0, 0, 0, 0, 1, 1]]]).bool()[:, None]  # fmt: skip
    assert torch.equal(mask.make(), expected)
