"""Conversion of the router's data to messages of the admin service."""

from baton.rpc.roles import role_to_message
from baton.v1 import admin_pb2
from baton.v1 import inference_pb2 as pb
from baton_router.apis.grpc.client_wire import candidate_to_message, placement_to_message
from baton_router.call.request import Request
from baton_router.call.usage import Account, Timings
from baton_router.lifecycle.worker_wire import duration
from baton_router.routing.placement.decision import Decision
from baton_router.routing.placement.explanation import candidacies, why
from baton_router.routing.placement.placement import Placement
from baton_router.routing.roles.role_balance import Balance, Flip


def request_info(
    request: Request, account: Account, placement: Placement | None, now: float
) -> admin_pb2.RequestInfo:
    """Returns a request in flight as of `now`, on the clock of its account."""
    timings = account.timings
    message = admin_pb2.RequestInfo(
        request_id=request.request_id,
        age=duration(now - timings.arrived),
        phase=_phase(timings),
        num_prompt_tokens=account.num_prompt_tokens,
        num_output_tokens=account.num_output_tokens,
        num_migrations=account.num_migrations,
        model=request.model,
        tenant=request.tenant.name,
    )
    if placement is not None:
        message.prefill_worker = placement.prefill
        message.decode_worker = placement.decode
    if timings.first_token is not None:
        message.time_to_first_token.CopyFrom(duration(timings.first_token - timings.arrived))
    return message


def _phase(timings: Timings) -> admin_pb2.RequestPhase.ValueType:
    if timings.admitted is None:
        return admin_pb2.REQUEST_PHASE_WAITING
    if timings.first_token is None:
        return admin_pb2.REQUEST_PHASE_PREFILL
    return admin_pb2.REQUEST_PHASE_DECODE


def explanation(decision: Decision, model: str = "") -> admin_pb2.ExplainPlacementResponse:
    """Returns a whole decision about a request of `model`; empty: it is not known. If there was no
    choice, its candidates have no terms."""
    inputs, placement = decision.inputs, decision.placement
    message = pb.Placement() if placement is None else placement_to_message(placement, ())
    message.candidates.extend(
        candidate_to_message(scored, computes_prompt=computes_prompt)
        for scored, computes_prompt in candidacies(decision)
    )
    return admin_pb2.ExplainPlacementResponse(
        request_id=inputs.request_id,
        num_tokens=inputs.num_tokens,
        policy=decision.rules.policy,
        placement=message,
        reason=why(decision),
        model=model,
    )


def _flip(flip: Flip) -> admin_pb2.RoleFlip:
    return admin_pb2.RoleFlip(worker=flip.worker, role=role_to_message(flip.role), epoch=flip.epoch)


def role_balance(
    balance: Balance, is_elastic: bool, model: str
) -> admin_pb2.GetRoleBalanceResponse:
    """Returns the answer of `Admin.GetRoleBalance` for a model."""
    flip = balance.flip
    return admin_pb2.GetRoleBalanceResponse(
        encode_pressure=balance.pressures["encode"],
        prefill_pressure=balance.pressures["prefill"],
        decode_pressure=balance.pressures["decode"],
        proposal=None if flip is None else _flip(flip),
        reason=balance.reason,
        is_elastic=is_elastic,
        model=model,
    )
