"""Figures of a model by one set of names, in both formats."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from unimem.models.dims import ArchMetadata
from unimem.models.fields import ConfigFields, Fields, MetadataFields, UnknownError


def metadata(**values: Any) -> MetadataFields:
    named = {f"x.{name.replace('__', '.')}": value for name, value in values.items()}
    return MetadataFields(ArchMetadata(named, "x"), "x")


@pytest.mark.parametrize(
    "fields",
    [
        metadata(block_count=2, embedding_length=8, attention__head_count=4),
        ConfigFields({"num_hidden_layers": 2, "hidden_size": 8, "num_attention_heads": 4}),
        ConfigFields({"n_layer": 2, "n_embd": 8, "n_head": 4}),
    ],
    ids=["metadata", "config", "older names"],
)
def test_both_formats_give_the_same_figures(fields: Fields) -> None:
    assert fields.required("block_count") == 2
    assert fields.head_size() == 2
    assert fields.number("attention.sliding_window") is None
    assert fields.per_layer("attention.head_count_kv", 2) is None
    assert fields.kinds(2) is None
    with pytest.raises(ValueError, match="has no '"):
        fields.required("context_length")


def test_a_family_has_own_names_sums_and_defaults() -> None:
    names = {"ssm.inner_size": "hidden_size*expand+1", "attention.key_length": "gone"}
    fields = ConfigFields(
        {"hidden_size": 8, "expand": 2, "one": 1, "1": 1}, names=names, defaults={"ssm.conv": 4}
    )
    assert fields.number("ssm.inner_size") == 17
    assert fields.number("attention.key_length") is None
    assert fields.number("ssm.conv") == 4


def test_values_per_layer_may_be_listed() -> None:
    fields = metadata(attention__head_count_kv=np.array([4, 0, 2], np.int32))
    assert fields.per_layer("attention.head_count_kv", 3) == [4, 0, 2]
    with pytest.raises(UnknownError, match="3 values for 2 layers"):
        fields.per_layer("attention.head_count_kv", 2)
    listed = ConfigFields({"layer_types": ["full_attention", "sliding_attention", "mamba"]})
    assert listed.kinds(3) == ["full", "sliding", "state"]
    with pytest.raises(UnknownError, match="not known to unimem"):
        ConfigFields({"layer_types": ["other"]}).kinds(1)


@pytest.mark.parametrize("value", [True, "8", -1, 2**31, 1.5, [8]])
def test_what_is_no_number_is_unknown(value: Any) -> None:
    with pytest.raises(UnknownError, match="has no number in 'hidden_size' from 0 to 2147483647"):
        ConfigFields({"hidden_size": value}).number("embedding_length")


def test_a_window_that_is_switched_off_is_none() -> None:
    fields = ConfigFields({"sliding_window": 4096, "use_sliding_window": False})
    assert fields.number("attention.sliding_window") == 0
