"""Inference service of the router over gRPC."""

import logging
from collections.abc import AsyncGenerator, Iterator
from contextlib import AbstractContextManager, aclosing, contextmanager, nullcontext
from typing import Any

from google.protobuf.message import Message

from baton.errors import InvalidArgumentError
from baton.rpc.params import defaults_to_message
from baton.serving.deadline import Deadline
from baton.serving.grpc.access import INFERENCE
from baton.serving.grpc.errors import code_of
from baton.serving.tenant import Tenants
from baton.v1 import inference_pb2 as pb
from baton.v1 import inference_pb2_grpc as pb_grpc
from baton_router.apis.grpc.call_wire import (
    CallReader,
    embed_call,
    images_beside,
    input_of,
    score_call,
)
from baton_router.apis.grpc.client_wire import pooled_output_to_message, to_message
from baton_router.routing.admission.rate_limit import RateLimits
from baton_router.served.served_models import Models, ServedModel
from baton_router.telemetry.call_observer import CallObserver

logger = logging.getLogger(__name__)


def observe(observer: CallObserver, context: Any, method: str) -> AbstractContextManager[None]:
    """Observes a call of the service; those of other services are not observed."""
    _, service, name = method.split("/")
    return _observing(observer, context, name) if service == INFERENCE else nullcontext()


@contextmanager
def _observing(observer: CallObserver, context: Any, name: str) -> Iterator[None]:
    with observer.observing(context, "grpc", name) as call:
        try:
            yield
        except BaseException as error:
            call.status = code_of(error)
            raise
        call.status = "OK"


class InferenceService(pb_grpc.InferenceServicer):
    """Inference service: text in, tokens out."""

    add_to_server = staticmethod(pb_grpc.add_InferenceServicer_to_server)

    def __init__(
        self,
        models: Models,
        tenants: Tenants,
        limits: RateLimits,
        timeout: float,
        calls: CallReader,
    ) -> None:
        """Limits calls whose client sets no deadline to `timeout` seconds."""
        self._models = models
        self._tenants = tenants
        self._limits = limits
        self._timeout = timeout
        self._calls = calls

    async def Generate(
        self, request: pb.GenerateRequest, context: Any
    ) -> AsyncGenerator[pb.GenerateResponse, None]:
        with self._models.failing(request.model):
            self._count(request, context)
        deadline = Deadline.of(context, self._timeout)
        try:
            call = await self._calls.generation(request)
        except InvalidArgumentError as error:
            self._models.refuse(request.model, context, error)
        async with aclosing(self._models.generate(call, context, deadline)) as events:
            async for event in events:
                yield to_message(event)

    async def Embed(self, request: pb.EmbedRequest, context: Any) -> pb.EmbedResponse:
        deadline = Deadline.of(context, self._timeout)
        with self._models.failing(request.model):
            tenant = self._count(request, context)
            try:
                call = embed_call(request)
            except InvalidArgumentError:
                self._limits.count_request(tenant)
                raise
        made = await self._models.embed(call, context, deadline)
        return pb.EmbedResponse(
            model=made.model,
            request_id=made.request_id,
            embeddings=[pb.Embedding(values=vector) for vector in made.vectors],
            num_prompt_tokens=made.num_prompt_tokens,
        )

    async def Score(self, request: pb.ScoreRequest, context: Any) -> pb.ScoreResponse:
        with self._models.failing(request.model):
            self._count(request, context)
        deadline = Deadline.of(context, self._timeout)
        made = await self._models.score(score_call(request), context, deadline)
        return pb.ScoreResponse(
            model=made.model,
            request_id=made.request_id,
            scores=made.scores,
            num_prompt_tokens=made.num_prompt_tokens,
        )

    async def Tokenize(self, request: pb.TokenizeRequest, context: Any) -> pb.TokenizeResponse:
        tenant = self._count(request, context)
        self._limits.count_request(tenant)
        intake = self._models.of(request.model).services.intake
        given, images = await input_of(request), images_beside(request)
        token_ids, text = await intake.tokenize(given, images, holder=tenant)
        return pb.TokenizeResponse(token_ids=token_ids, text=text)

    def _count(self, request: Message, context: Any) -> str:
        """Counts the bytes of a call, and returns its tenant."""
        tenant = self._tenants.of(context).name
        self._limits.count_bytes(tenant, request.ByteSize())
        return tenant

    async def GetModel(self, request: pb.GetModelRequest, context: Any) -> pb.GetModelResponse:
        self._limits.count_request(self._count(request, context))
        return _model_to_message(self._models.of(request.model))

    async def ListModels(
        self, request: pb.ListModelsRequest, context: Any
    ) -> pb.ListModelsResponse:
        self._limits.count_request(self._count(request, context))
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
        sampling_defaults=defaults_to_message(card.sampling_defaults),
    )
