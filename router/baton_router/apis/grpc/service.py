"""Inference service of the router over gRPC."""

import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from baton.serving.deadline import Deadline
from baton.serving.tenant import Tenants
from baton.v1 import inference_pb2 as pb
from baton.v1 import inference_pb2_grpc as pb_grpc
from baton_router.apis.grpc.client_wire import pooled_output_to_message, to_message
from baton_router.routing.admission.rate_limit import RateLimits
from baton_router.served.served_models import Models, ServedModel

logger = logging.getLogger(__name__)


class InferenceService(pb_grpc.InferenceServicer):
    """Inference service: text in, tokens out."""

    def __init__(
        self, models: Models, tenants: Tenants, limits: RateLimits, timeout: float
    ) -> None:
        """Limits calls whose client sets no deadline to `timeout` seconds."""
        self._models = models
        self._tenants = tenants
        self._limits = limits
        self._timeout = timeout

    async def Generate(
        self, request: pb.GenerateRequest, context: Any
    ) -> AsyncGenerator[pb.GenerateResponse, None]:
        self._limits.count_bytes(self._tenants.of(context).name, request.ByteSize())
        deadline = Deadline.of(context, self._timeout)
        async with aclosing(self._models.generate(request, context, deadline)) as events:
            async for event in events:
                yield to_message(event)

    async def Embed(self, request: pb.EmbedRequest, context: Any) -> pb.EmbedResponse:
        self._limits.count_bytes(self._tenants.of(context).name, request.ByteSize())
        return await self._models.embed(request, context, Deadline.of(context, self._timeout))

    async def Score(self, request: pb.ScoreRequest, context: Any) -> pb.ScoreResponse:
        self._limits.count_bytes(self._tenants.of(context).name, request.ByteSize())
        return await self._models.score(request, context, Deadline.of(context, self._timeout))

    async def Tokenize(self, request: pb.TokenizeRequest, context: Any) -> pb.TokenizeResponse:
        tenant = self._tenants.of(context).name
        self._limits.count_bytes(tenant, request.ByteSize())
        self._limits.count_request(tenant)
        token_ids, text = await self._models.tokenize(request)
        return pb.TokenizeResponse(token_ids=token_ids, text=text)

    async def GetModel(self, request: pb.GetModelRequest, context: Any) -> pb.GetModelResponse:
        self._tenants.of(context)  # raises for an unknown caller
        return _model_to_message(self._models.of(request.model))

    async def ListModels(
        self, _request: pb.ListModelsRequest, context: Any
    ) -> pb.ListModelsResponse:
        self._tenants.of(context)
        aliases = sorted(self._models.aliases.items())
        return pb.ListModelsResponse(
            models=map(_model_to_message, self._models),
            aliases=[pb.ModelAlias(name=name, weights=weights) for name, weights in aliases],
        )


def _model_to_message(served: ServedModel) -> pb.GetModelResponse:
    card, inference = served.services.card, served.inference
    return pb.GetModelResponse(
        name=card.name,
        architecture=card.architecture,
        vocab_size=card.vocab_size,
        max_model_len=inference.max_model_len,
        eos_token_ids=sorted(card.eos_token_ids),
        has_chat_template=card.chat_template is not None,
        fingerprint=inference.fingerprint,
        has_workers=served.has_workers,
        pooled_output=pooled_output_to_message("" if card.pooling is None else card.pooling.kind),
        takes_images=served.services.intake.images.are_taken,
    )
