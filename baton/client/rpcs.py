"""Unary calls of the client, each described once for both clients. Opens no connection."""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Generic, ParamSpec, TypeVar

import grpc

from baton.client.connections import RouterStubs
from baton.client.router_messages import (
    embed_request,
    embeddings_of,
    explain_request,
    explanation_of,
    flush_cache_request,
    info_of,
    load_of,
    memory_of,
    model_of,
    models_of,
    requests_of,
    role_balance_of,
    score_request,
    scores_of,
    set_role_request,
    tokenize_request,
    tokens_of,
    workers_of,
)
from baton.v1 import admin_pb2 as admin
from baton.v1 import inference_pb2 as pb

_Arguments = ParamSpec("_Arguments")
_Request = TypeVar("_Request")
_Response = TypeVar("_Response")
_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True)
class Rpc(Generic[_Arguments, _Request, _Response, _Result]):
    """Unary call of a router.

    Attributes:
        method: of the stubs of the router that is called.
        request: makes the request message of the call's arguments.
        parse: converts the response message.
        failover_codes: codes of one router after which the next one is called; a router that
            cannot be reached always leads to the next.
    """

    method: "Callable[[RouterStubs], grpc.UnaryUnaryMultiCallable[_Request, _Response]]"
    request: Callable[_Arguments, _Request]
    parse: Callable[[_Response], _Result]
    failover_codes: Collection[grpc.StatusCode] = ()


def _epoch_of(message: admin.SetRoleResponse) -> int:
    return message.epoch


def _num_waiting_of(
    message: admin.PauseAdmissionResponse | admin.ResumeAdmissionResponse,
) -> int:
    return message.num_waiting


def _num_blocks_of(message: admin.FlushCacheResponse) -> int:
    return message.num_blocks


# Another router may serve the request.
_NOT_FOUND = (grpc.StatusCode.NOT_FOUND,)

TOKENIZE = Rpc(lambda stubs: stubs.inference.Tokenize, tokenize_request, tokens_of)
EMBED = Rpc(lambda stubs: stubs.inference.Embed, embed_request, embeddings_of)
SCORE = Rpc(lambda stubs: stubs.inference.Score, score_request, scores_of)
GET_MODEL = Rpc(lambda stubs: stubs.inference.GetModel, pb.GetModelRequest, model_of)
LIST_MODELS = Rpc(lambda stubs: stubs.inference.ListModels, pb.ListModelsRequest, models_of)
LIST_WORKERS = Rpc(lambda stubs: stubs.admin.ListWorkers, admin.ListWorkersRequest, workers_of)
LIST_REQUESTS = Rpc(lambda stubs: stubs.admin.ListRequests, admin.ListRequestsRequest, requests_of)
EXPLAIN = Rpc(lambda stubs: stubs.admin.ExplainPlacement, explain_request, explanation_of)
EXPLAIN_REQUEST = Rpc(
    lambda stubs: stubs.admin.ExplainPlacement,
    admin.ExplainPlacementRequest,
    explanation_of,
    failover_codes=_NOT_FOUND,
)
GET_LOAD = Rpc(lambda stubs: stubs.admin.GetLoad, admin.GetLoadRequest, load_of)
GET_INFO = Rpc(lambda stubs: stubs.admin.GetInfo, admin.GetInfoRequest, info_of)
ROLE_BALANCE = Rpc(
    lambda stubs: stubs.admin.GetRoleBalance, admin.GetRoleBalanceRequest, role_balance_of
)
SET_ROLE = Rpc(lambda stubs: stubs.admin.SetRole, set_role_request, _epoch_of)
PAUSE_ADMISSION = Rpc(
    lambda stubs: stubs.admin.PauseAdmission, admin.PauseAdmissionRequest, _num_waiting_of
)
RESUME_ADMISSION = Rpc(
    lambda stubs: stubs.admin.ResumeAdmission, admin.ResumeAdmissionRequest, _num_waiting_of
)
GET_MEMORY = Rpc(lambda stubs: stubs.admin.GetMemory, admin.GetMemoryRequest, memory_of)
FLUSH_CACHE = Rpc(lambda stubs: stubs.admin.FlushCache, flush_cache_request, _num_blocks_of)
ABORT = Rpc(
    lambda stubs: stubs.admin.Abort, admin.AbortRequest, lambda _: None, failover_codes=_NOT_FOUND
)
