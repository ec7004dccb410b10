"""minikv: CompressKV in plain PyTorch, small enough to read beside the paper."""

from minikv.budget import Bytes, Share
from minikv.inference import Prefill, compress, decode, prefill, prefill_for, prefill_layer_by_layer
from minikv.srh import Profile
from minikv.weights import load

__all__ = ["Bytes", "Prefill", "Profile", "Share", "compress", "decode", "load", "prefill"]
__all__ += ["prefill_for", "prefill_layer_by_layer"]
