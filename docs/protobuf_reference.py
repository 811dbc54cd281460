"""Reference of the protobuf API, from the `.proto` files and their comments."""

import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from google.protobuf.descriptor_pb2 import (
    FieldDescriptorProto,
    FileDescriptorProto,
    FileDescriptorSet,
)

from docs.tables import code, page, prose, table

PROTOS = Path(__file__).resolve().parents[1] / "protos"
PACKAGE = ".baton.v1."
# Numbers of the fields in descriptor.proto, of which a comment's path is made.
_MESSAGES, _ENUMS, _SERVICES = 4, 5, 6
_FIELDS, _NESTED, _NESTED_ENUMS, _METHODS, _VALUES, _PACKAGE = 2, 3, 4, 2, 2, 2

Comments = dict[tuple[int, ...], str]


def pages() -> dict[str, str]:
    """Returns a page for each `.proto` file, by its name."""
    files = _descriptors()
    places = {
        f"{PACKAGE}{name}": Path(file.name).stem
        for file in files
        for name in [*(m.name for m in file.message_type), *(e.name for e in file.enum_type)]
    }
    return {f"{Path(file.name).stem}.md": _Page(file, places).text() for file in files}


def _descriptors() -> list[FileDescriptorProto]:
    import grpc_tools  # type: ignore[import-untyped]
    from grpc_tools import protoc

    well_known = Path(grpc_tools.__file__).parent / "_proto"
    sources = sorted((PROTOS / "baton/v1").glob("*.proto"))
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch) / "descriptors"
        options = ["--include_source_info", f"--descriptor_set_out={out}"]
        arguments = ["protoc", f"-I{PROTOS}", f"-I{well_known}", *options, *map(str, sources)]
        if protoc.main(arguments) != 0:
            raise SystemExit("protoc failed; its messages are above")
        return list(FileDescriptorSet.FromString(out.read_bytes()).file)


class _Page:
    """Page of one file. Paths name places in the file as `SourceCodeInfo` does."""

    def __init__(self, file: FileDescriptorProto, places: dict[str, str]) -> None:
        self._file = file
        self._places = places
        self._comments: Comments = {
            tuple(at.path): _unwrapped(at.leading_comments)
            for at in file.source_code_info.location
            if at.leading_comments
        }

    def text(self) -> str:
        file = self._file
        source = f"`protos/{file.name}`, package `{file.package}`."
        parts = [source, self._said(_PACKAGE)]
        for i, service in enumerate(file.service):
            parts += self._service(service, (_SERVICES, i))
        for i, message in enumerate(file.message_type):
            parts += self._message(message, (_MESSAGES, i), message.name)
        for i, enum in enumerate(file.enum_type):
            parts += self._enum(enum, (_ENUMS, i), enum.name)
        return page(Path(file.name).name, *parts)

    def _said(self, *path: int) -> str:
        return self._comments.get(path, "")

    def _service(self, service: Any, path: Sequence[int]) -> Iterator[str]:
        yield f"## {service.name}"
        yield self._said(*path)
        for i, method in enumerate(service.method):
            asked = _stream(method.client_streaming) + self._type(method.input_type)
            answered = _stream(method.server_streaming) + self._type(method.output_type)
            yield f"### {service.name}.{method.name}"
            yield f"{asked} → {answered}"
            yield self._said(*path, _METHODS, i)

    def _message(self, message: Any, path: Sequence[int], name: str) -> Iterator[str]:
        yield f"## {name}"
        yield self._said(*path)
        rows = [
            (
                code(field.name),
                str(field.number),
                self._field_type(field, message),
                " ".join(self._said(*path, _FIELDS, i).split()),
            )
            for i, field in enumerate(message.field)
        ]
        if rows:
            yield table(("field", "number", "type", "meaning"), rows)
        for i, nested in enumerate(message.nested_type):
            if not nested.options.map_entry:
                yield from self._message(nested, (*path, _NESTED, i), f"{name}.{nested.name}")
        for i, enum in enumerate(message.enum_type):
            yield from self._enum(enum, (*path, _NESTED_ENUMS, i), f"{name}.{enum.name}")

    def _enum(self, enum: Any, path: Sequence[int], name: str) -> Iterator[str]:
        yield f"## {name}"
        yield self._said(*path)
        rows = [
            (code(v.name), str(v.number), " ".join(self._said(*path, _VALUES, i).split()))
            for i, v in enumerate(enum.value)
        ]
        yield table(("value", "number", "meaning"), rows)

    def _field_type(self, field: FieldDescriptorProto, message: Any) -> str:
        entry = {e.name: e for e in message.nested_type if e.options.map_entry}.get(
            field.type_name.rpartition(".")[2]
        )
        if entry is not None:
            key, value = (self._plain_type(f) for f in entry.field)
            return f"map of {key} to {value}"
        text = self._plain_type(field)
        if field.label == FieldDescriptorProto.LABEL_REPEATED:
            return f"repeated {text}"
        if field.proto3_optional:
            return f"optional {text}"
        if field.HasField("oneof_index"):
            return f"{text}, one of `{message.oneof_decl[field.oneof_index].name}`"
        return text

    def _plain_type(self, field: FieldDescriptorProto) -> str:
        if field.type_name:
            return self._type(field.type_name)
        return code(FieldDescriptorProto.Type.Name(field.type).removeprefix("TYPE_").lower())

    def _type(self, name: str) -> str:
        """Returns a link to a message or enum of this package; code for any other."""
        short = name.removeprefix(PACKAGE)
        place = self._places.get(PACKAGE + short.split(".")[0]) if short != name else None
        if place is None:
            return code(name.removeprefix("."))
        page_of = "" if place == Path(self._file.name).stem else f"{place}.md"
        return f"[`{short}`]({page_of}#{short.lower().replace('.', '')})"


def _stream(is_stream: bool) -> str:
    return "stream of " if is_stream else ""


def _unwrapped(comment: str) -> str:
    """Returns a comment without the space that begins its lines."""
    lines = [line.removeprefix(" ") for line in comment.strip("\n").splitlines()]
    return prose("\n".join(lines))
