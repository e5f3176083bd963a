"""Which text a run reads, and how it is cut into batches."""

import dataclasses

from examples.kit.data.load import Data, load, vocabulary


@dataclasses.dataclass(frozen=True)
class Text:
    """A choice of text.

    Attributes:
        path: What `examples.kit.data.load.load` reads; None for the Python standard library.
        tokenizer: Path of a ``tokenizer.json``; None for the data's own, or bytes.
        seq_len: Tokens a sequence.
        batch_size: Sequences a step, over all hosts.
        seed: Of the order; trainers draw the parameters from it too.
        packing: ``"concat"`` or ``"document"``.
    """

    path: str | None
    tokenizer: str | None
    seq_len: int
    batch_size: int
    seed: int
    packing: str = "concat"

    def load(self, share: int = 0, shares: int = 1) -> Data:
        """Loads one share of every batch.

        Args:
            share: Which one this host reads.
            shares: Into how many the hosts divide a batch.

        Raises:
            DataError: If the data cannot be used.
        """
        return load(
            self.path,
            seq_len=self.seq_len,
            batch_size=self.batch_size // shares,
            seed=self.seed,
            tokenizer=self.tokenizer,
            packing=self.packing,
            process_index=share,
            process_count=shares,
        )

    def vocabulary(self) -> int:
        """Returns how many token ids there are, without reading the text.

        Raises:
            DataError: If there is no such data or tokenizer.
        """
        return vocabulary(self.path, self.tokenizer)
