"""One forward: a mixed batch of tokens in, float32 scores of the rows that want them out.

It composes the operators in `kernels/`: embedding look-up, the decoder stack, the final norm and the head,
each with its one-bit term per token. On a GPU, batches that only decode are padded to a power of two and
replayed as CUDA graphs; the padding alone also runs on the CPU, where it is tested. It knows tokens and
slots, not jobs or names.
"""

from __future__ import annotations

import torch
from torch import Tensor

from zen_train.kernels.bitdelta_embedding import bitdelta_embedding
from zen_train.kernels.bitdelta_linear import round_folded, unpack_signs
from zen_train.kernels.common import DeltaBank
from zen_train.kernels.decoder import KvPool, decoder_stack, head_logits, rms_norm, use_huge_pages
from zen_train.kernels.directions_linear import direction_rows
from zen_train.serve.engine.batch import BatchBuilder, StepBatch, power_of_two
from zen_train.serve.engine.graphs import GraphedForward
from zen_train.serve.engine.parameters import EMBEDDING, FINAL_NORM
from zen_train.serve.engine.scheduler import Span
from zen_train.serve.engine.weights import ServedModel


def embed(
    token_T: Tensor, table_NK: Tensor, bank: DeltaBank, plane_PT: Tensor, *, backend: str = "auto"
) -> Tensor:
    """Rows of the embedding with the one-bit terms of all planes, `[T, K]` in the table's dtype."""
    if plane_PT.shape[0] == 1:
        return bitdelta_embedding(token_T, table_NK, bank, plane_PT[0], backend=backend)
    token = token_T.long()
    out_TK = table_NK[token].float()
    for plane_T in plane_PT.long():
        slot_T = plane_T.clamp(min=0)
        scale_T = torch.where(plane_T >= 0, bank.row_scale_VPN[slot_T, 0, token], 0.0)
        out_TK += scale_T.unsqueeze(1) * unpack_signs(bank.sign_VPNB[slot_T, 0, token], bank.in_features)
    return round_folded(out_TK, table_NK.dtype)


class Runner:
    """The forward over one KV pool. Used by the step thread alone."""

    def __init__(
        self,
        model: ServedModel,
        builder: BatchBuilder,
        *,
        pages: int,
        page_tokens: int,
        graphs: bool,
        pad: bool,
        kernels: str = "auto",
    ) -> None:
        self._model = model
        self._builder = builder
        self._pad = pad
        self._kernels = kernels
        shape = model.architecture.decoder
        size = (
            model.architecture.layers, 2, pages + builder.padding_pages, shape.kv_heads, page_tokens, shape.head_dim
        )  # fmt: skip
        self.kv = KvPool(kv=torch.zeros(size, dtype=model.dtype, device=model.blocks.device))
        use_huge_pages(self.kv.kv, now=False)
        use_huge_pages(model.matrices[EMBEDDING], model.matrices[model.head_target])
        builder.set_padding_pages(pages)
        self._graphed = GraphedForward(self._forward) if graphs else None

    def scores(self, spans: list[Span]) -> Tensor:
        """Run the spans, in inference mode. Float32 `[S, vocabulary]`: a row for each span that reaches its
        sequence's end, in order.
        """
        decodes_only = all(span.count == 1 and span.reaches_end for span in spans)
        if not (self._pad and decodes_only):
            return self._forward(self._builder.build(spans))
        batch = self._builder.build(spans, tokens=power_of_two(len(spans)))
        run = self._graphed or self._forward
        return run(batch)[: len(spans)]

    def _forward(self, batch: StepBatch) -> Tensor:
        model, tokens = self._model, batch.tokens
        hidden_TD = embed(
            batch.token_T,
            model.matrices[EMBEDDING],
            model.banks[EMBEDDING],
            tokens.plane_PT,
            backend=self._kernels,
        )
        direction_T = tokens.direction_T
        if direction_T is not None:
            hidden_TD = direction_rows(
                hidden_TD, batch.token_T, model.directions[EMBEDDING], direction_T, backend=self._kernels
            )
        hidden_TD = decoder_stack(
            hidden_TD,
            model.blocks,
            shape=model.architecture.decoder,
            batch=tokens,
            kv=self.kv,
            rotary=model.rotary,
            backend=self._kernels,
        )
        wanted_S, vector_T, plane_PT = batch.wanted_S, tokens.vector_T, tokens.plane_PT
        if wanted_S.shape[0] != hidden_TD.shape[0]:
            hidden_TD = hidden_TD.index_select(0, wanted_S)
            vector_T, plane_PT = vector_T.index_select(0, wanted_S), plane_PT.index_select(1, wanted_S)
            if direction_T is not None:
                direction_T = direction_T.index_select(0, wanted_S)
        normed_SD = rms_norm(
            hidden_TD, model.tables[FINAL_NORM], vector_T, model.architecture.decoder.norm_eps
        )
        head = model.head_target
        return head_logits(
            normed_SD,
            model.matrices[head],
            model.banks[head],
            plane_PT,
            directions=model.directions.get(head),
            direction_T=direction_T,
            backend=self._kernels,
        )
