"""When attention layers drop weights, and by which keys: with the arguments and the meaning of Flax's own layers."""

from flax import nnx
from jaxtyping import Array

from jflash.errors import ArgumentError


class DropoutLayer(nnx.Module):
    """A layer of NNX that may drop weights of attention, as `nnx.MultiHeadAttention` does.

    Attributes:
      deterministic: whether calls that do not say it themselves drop nothing; `model.train()`, `model.eval()` and
        `nnx.view(model, deterministic=...)` set it. None means that each call says it.
      rngs: the stream of keys of calls that bring none; None where nothing is dropped, or with `keep_rngs=False`.
    """

    def __init__(self, dropout_rate: float, *, deterministic: bool | None, rngs: nnx.Rngs, keep_rngs: bool):
        self._dropout_rate = dropout_rate
        self.deterministic = deterministic
        self.rngs = rngs.dropout.fork() if keep_rngs and dropout_rate else None

    def set_view(self, deterministic: bool | None = None) -> None:
        """What `nnx.view` calls."""
        self.deterministic = self.deterministic if deterministic is None else deterministic

    def _dropout_key(self, deterministic: bool | None, rngs: nnx.Rngs | nnx.RngStream | None) -> Array | None:
        """The key of one call; None where nothing is dropped.

        Raises:
          ArgumentError: neither the call nor the layer says whether weights are dropped, or has keys.
        """
        if not self._dropout_rate:
            return None
        deterministic = self.deterministic if deterministic is None else deterministic
        if deterministic is None:
            wanted = f"True or False with dropout_rate={self._dropout_rate:g}"
            hint = "Pass it to the call or to the layer, or call model.train() or model.eval()."
            raise ArgumentError("deterministic", found="None", wanted=wanted, hint=hint)
        if deterministic:
            return None
        rngs = self.rngs if rngs is None else rngs
        if rngs is None:
            raise ArgumentError("rngs", found="None", wanted="nnx.Rngs in a layer made with keep_rngs=False")
        return rngs.dropout() if isinstance(rngs, nnx.Rngs) else rngs()

    def _check_drops_nothing(self) -> None:
        check_drops_nothing(self._dropout_rate, self.deterministic)


def check_drops_nothing(dropout_rate: float, deterministic: bool | None) -> None:
    """Refuses prefill and decoding, which drop no weights, in a layer that is set to drop some.

    Raises:
      ArgumentError: it is.
    """
    if dropout_rate and deterministic is False:
        hint = "Call model.eval() or use nnx.view(model, deterministic=True); in Linen, make the layer without it."
        raise ArgumentError("deterministic", found="False", wanted="True or None where a cache is used", hint=hint)
