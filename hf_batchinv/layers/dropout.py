"""torch.nn.Dropout with p > 0: nothing to do in eval mode, an error in training mode."""

MESSAGE = (
    "a batch-invariant model cannot run dropout (p={p}) in training mode, since what is dropped from a row depends on "
    "the rows before it; call model.eval() or set the dropout probability to 0 in the config"
)


def make_forward(stock: type, options: tuple):
    def forward(self, input):
        """Return the input; raises ValueError in training mode if p > 0."""
        if self.training and self.p > 0:
            raise ValueError(MESSAGE.format(p=self.p))
        return input

    return forward
