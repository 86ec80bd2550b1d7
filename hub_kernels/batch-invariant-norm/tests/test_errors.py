"""Unsupported arguments raise one sentence that names the argument, what is expected and what was given."""

import pytest
import torch

X = torch.ones(2, 8)
W = torch.ones(8)


def calls(kernel):
    """Each function with a tensor of a given dtype in the place of x."""
    return {
        "rms_norm": lambda x: kernel.rms_norm(x, W, 1e-6),
        "rms_norm_gated": lambda x: kernel.rms_norm_gated(x, X, W, 1e-6),
        "layer_norm": lambda x: kernel.layer_norm(x, (8,), None, None, 1e-5),
        "softmax": lambda x: kernel.softmax(x, -1),
        "log_softmax": lambda x: kernel.log_softmax(x, -1),
        "mean": lambda x: kernel.mean(x, -1),
        "sum": lambda x: kernel.sum(x, -1),
    }


def assert_one_sentence(error):
    text = str(error.value)
    assert "\n" not in text and ". " not in text and 20 < len(text) < 250, text


@pytest.mark.parametrize("dtype", [torch.float64, torch.float8_e4m3fn, torch.int8, torch.complex64], ids=str)
def test_other_dtypes_are_refused(kernel, dtype):
    for name, call in calls(kernel).items():
        if name == "sum" and dtype is torch.int8:
            continue  # exact, left to torch
        with pytest.raises(TypeError, match=f"{name}: x must be float32, float16 or bfloat16, got") as error:
            call(X.to(dtype))
        assert_one_sentence(error)


CASES = {
    "weight size": (lambda k: k.rms_norm(X, torch.ones(4), 1e-6), ValueError, "weight must have shape"),
    "weight dtype": (lambda k: k.rms_norm(X, W.double(), 1e-6), TypeError, "weight must be float32"),
    "weight device": (lambda k: k.rms_norm(X, W.to("meta"), 1e-6), ValueError, "weight must be on the device of x"),
    "0-d": (lambda k: k.rms_norm(torch.tensor(1.0), None, 1e-6), ValueError, "at least one dimension"),
    "no tensor": (lambda k: k.rms_norm([1.0], None, 1e-6), TypeError, "must be a tensor"),
    "group": (lambda k: k.rms_norm(X, W, 1e-6, group_size=3), ValueError, "group_size must divide"),
    "cast": (lambda k: k.rms_norm(X, None, 1e-6, cast_to_weight_dtype=True), ValueError, "needs a weight"),
    "gate shape": (lambda k: k.rms_norm_gated(X, X[:1], W, 1e-6), ValueError, "gate must have shape"),
    "gate dtype": (lambda k: k.rms_norm_gated(X, X.int(), W, 1e-6), TypeError, "gate must be float32"),
    "gate device": (lambda k: k.rms_norm_gated(X, X.to("meta"), W, 1e-6), ValueError, "gate must be on the device"),
    "activation": (lambda k: k.rms_norm_gated(X, X, W, 1e-6, activation="gelu"), ValueError, "activation must be"),
    "shape": (lambda k: k.layer_norm(X, (4,), None, None, 1e-5), ValueError, "normalized_shape must be"),
    "bias dtype": (lambda k: k.layer_norm(X, (8,), W, W.half(), 1e-5), TypeError, "bias must have the weight's dtype"),
    "bias size": (lambda k: k.layer_norm(X, (8,), W, W[:4], 1e-5), ValueError, "bias must have shape"),
    "bias device": (lambda k: k.layer_norm(X, (8,), W, W.to("meta"), 1e-5), ValueError, "bias must be on the device"),
    "dim": (lambda k: k.softmax(X, 2), IndexError, "dim must be between -2 and 1"),
    "dim type": (lambda k: k.softmax(X, None), TypeError, "dim must be an int"),
    "dims": (lambda k: k.sum(X, (0, 3)), IndexError, "dim must be between"),
    "dims twice": (lambda k: k.mean(X, (0, -2)), ValueError, "dim must name each dimension once"),
    "out dtype": (lambda k: k.softmax(X, -1, dtype=torch.float64), TypeError, "dtype must be float32"),
    "sum dtype": (lambda k: k.sum(X, -1, dtype=torch.float64), TypeError, "dtype must be float32"),
    "mean of int": (lambda k: k.mean(X.int(), -1), TypeError, "x must be float32"),
}


@pytest.mark.parametrize("case", CASES)
def test_bad_arguments_raise_one_sentence(kernel, case):
    call, kind, message = CASES[case]
    with pytest.raises(kind, match=message) as error:
        call(kernel)
    assert_one_sentence(error)


def test_backward_raises(kernel):
    """There is no gradient formula; asking for a gradient fails instead of giving a wrong or missing one."""
    for call in calls(kernel).values():
        x = torch.randn(2, 8, requires_grad=True)
        with pytest.raises(RuntimeError, match="has no backward"):
            call(x).sum().backward()
    weight = torch.ones(8, requires_grad=True)
    with pytest.raises(RuntimeError, match="has no backward"):
        kernel.rms_norm(X, weight, 1e-6).sum().backward()
