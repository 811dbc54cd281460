"""HTML page at `/`: one self-contained document, whose content security policy permits no other.

The document is `files/page.html` with the style sheet and scripts that it names put in their
places. `marked.umd.js` and `purify.min.js` are as their packages have them.
"""

import base64
import gzip
import hashlib
import json
import re
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response

from baton.serving.telemetry.placement_terms import TERMS

_FILES = Path(__file__).parent / "files"
_TERMS = '<script id="terms" type="application/json">'


def _text_of(name: str) -> str:
    return (_FILES / name).read_text(encoding="utf-8")


def _document() -> str:
    def style(found: re.Match[str]) -> str:
        return f"<style>{_text_of(found[1])}</style>"

    def script(found: re.Match[str]) -> str:
        return f"<script>{_text_of(found[1])}</script>"

    page = re.sub(r'<link rel="stylesheet" href="(.+?)">', style, _text_of("page.html"))
    page = re.sub(r'<script src="(.+?)"></script>', script, page)
    return page.replace(_TERMS, _TERMS + json.dumps(dict(TERMS)).replace("<", "\\u003c"))


def _permitted(element: str) -> str:
    """Returns the policy's source expressions for such elements of the page: their hashes."""
    contents = re.findall(rf"<{element}>(.*?)</{element}>".encode(), _PAGE, re.DOTALL)
    hashes = (base64.b64encode(hashlib.sha256(content).digest()).decode() for content in contents)
    return " ".join(f"'sha256-{digest}'" for digest in hashes)


_PAGE = _document().encode()
_COMPRESSED = gzip.compress(_PAGE, mtime=0)
_ETAG = f'"{hashlib.sha256(_PAGE).hexdigest()[:32]}"'
_HEADERS = {
    "content-type": "text/html; charset=utf-8",
    "content-security-policy": (
        f"default-src 'none'; script-src {_permitted('script')}; style-src {_permitted('style')}; "
        "img-src data:; connect-src 'self'; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types dompurify"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
    "vary": "accept-encoding",
    "etag": _ETAG,
}


def page_response(request: Request) -> Response:
    """Returns the page, compressed if the browser takes that, or 304 if it has this one."""
    if request.headers.get("if-none-match") == _ETAG:
        return Response(status_code=304, headers=_HEADERS)
    if "gzip" in request.headers.get("accept-encoding", ""):
        return Response(_COMPRESSED, headers={**_HEADERS, "content-encoding": "gzip"})
    return Response(_PAGE, headers=_HEADERS)
