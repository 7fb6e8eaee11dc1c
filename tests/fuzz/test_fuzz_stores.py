# SPDX-License-Identifier: Apache-2.0
"""Any response of a store gives a complete result within bounds, or an error of the contract."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Mapping
from typing import Any
from xml.sax.saxutils import escape

import pytest
from botocore.credentials import Credentials
from hypothesis import given
from hypothesis import strategies as st
from swansong.bounds import BYTES_MAX, BoundsError
from swansong_bucket.errors import StoreError, Transient
from swansong_bucket.stores import responses
from swansong_bucket.stores.azure.auth import SharedKey
from swansong_bucket.stores.base import Body, ObjectInfo, Page, listed
from swansong_bucket.stores.http.client import Response
from swansong_bucket.stores.responses import ListedPage
from swansong_bucket.stores.s3.access import Route
from swansong_bucket.util.http1 import HEADERS_MAX, ResponseReader

from testkit.bodies import CountedSink
from testkit.store_backends import store_at

BASE = "prefix/"

# ---------------------------------------------------------------- what stores say

text = st.text(st.characters(blacklist_categories=["Cs", "Cc"]), max_size=20)
keys = st.one_of(text, text.map(lambda key: BASE + key))
numbers = st.one_of(
    st.integers().map(str), st.integers(0, 2**64).map(str), st.sampled_from(["", "1e3", "٣", "-0"])
)
flags = st.sampled_from(["true", "false", "TRUE", "", "maybe"])
FIELDS: dict[str, st.SearchStrategy[str]] = {
    "Key": keys, "Size": numbers, "ETag": text, "LastModified": text, "Prefix": keys,
    "IsTruncated": flags, "KeyCount": numbers,
    "NextContinuationToken": text, "EncodingType": st.sampled_from(["url", ""]), "Code": text,
    "Message": text, "Name": keys, "NextMarker": text, "Content-Length": numbers,
}  # fmt: skip
ROOTS = ["ListBucketResult", "EnumerationResults", "DeleteResult", "Error", "html", "x"]


def element(tag: str, inner: str) -> str:
    return f"<{tag}>{inner}</{tag}>"


@st.composite
def elements(draw: st.DrawFn) -> str:
    """Some fields, in any order, some of them twice."""
    chosen = draw(st.lists(st.sampled_from(sorted(FIELDS)), max_size=6))
    return "".join(element(tag, escape(draw(FIELDS[tag]))) for tag in chosen)


@st.composite
def documents(draw: st.DrawFn) -> bytes:
    """Documents as stores send them, with missing, misplaced or truncated content."""
    items = draw(
        st.lists(
            st.tuples(
                st.sampled_from(["Contents", "CommonPrefixes", "Error", "Rule", "Blobs"]),
                elements(),
            ),
            max_size=3,
        )
    )
    blob = draw(elements()) + element("Properties", draw(elements()))
    blobs = element(draw(st.sampled_from(["Blob", "BlobPrefix"])), blob)
    items += [("Blobs", blobs)] * draw(st.integers(0, 1))
    inner = draw(elements()) + "".join(element(tag, item) for tag, item in items)
    body = element(draw(st.sampled_from(ROOTS)), inner).encode()
    return body[: draw(st.one_of(st.just(len(body)), st.integers(0, len(body))))]


values = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), keys, numbers),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(text, inner, max_size=3)),
    max_leaves=8,
)
json_pages = st.fixed_dictionaries(
    {},
    optional={
        "kind": st.sampled_from(["storage#objects", "storage#object", "x"]),
        "items": st.one_of(
            values,
            st.lists(
                st.fixed_dictionaries(
                    {},
                    optional={"name": st.one_of(keys, values), "size": st.one_of(numbers, values)},
                ),
                max_size=3,
            ),
        ),
        "nextPageToken": st.one_of(text, values),
        "name": st.one_of(st.just(BASE + "key"), values),
        "size": st.one_of(numbers, values),
        "crc32c": st.one_of(st.just("AAAAAA=="), values),
        "error": values,
    },
)
bodies = st.one_of(
    st.binary(max_size=200),
    documents(),
    json_pages.map(lambda page: json.dumps(page).encode()),
    values.map(lambda value: json.dumps(value).encode()),
)
headers = st.dictionaries(
    st.sampled_from([
        "etag", "content-length", "content-range", "date", "retry-after", "x-goog-hash", "location",
        "x-amz-bucket-region", "x-amz-checksum-crc32c", "x-ms-error-code", "content-md5",
    ]),
    st.one_of(text, numbers, st.sampled_from(['"x"', "crc32c=AAAAAA==", "bytes 0-2/3", "eu-west-1"])),
    max_size=5,
)  # fmt: skip
statuses = st.one_of(
    st.sampled_from([200, 200, 204, 206, 301, 307, 400, 401, 403, 404, 412]), st.integers(200, 599)
)
said = st.builds(Response, statuses, headers, bodies)


def parsed(call: Callable[[], Any]) -> Any:
    """The result of a parser; None if it raises one short line that names the problem."""
    try:
        return call()
    except BoundsError as error:
        reason = str(error)
    assert 0 < len(reason) < 500
    return None


# ---------------------------------------------------------------- parsers


@given(bodies, headers)
def test_documents_are_whole_or_refused(body: bytes, fields: dict[str, str]) -> None:
    """Keys have the prefix, sizes and numbers are within their range, ids and tokens are not empty."""
    answer = Response(200, fields, body)
    for page in (
        parsed(lambda: responses.objects(answer, BASE, "")),
        parsed(lambda: responses.json_objects(answer, BASE, "")),
        parsed(lambda: responses.blobs(answer, BASE, "")),
    ):
        for info in page.infos if page is not None else ():
            assert 0 <= info.size_bytes <= BYTES_MAX
        if page is not None and page.token is not None:
            assert 0 < len(page.token) <= 4096
    metadata = parsed(lambda: responses.json_metadata(answer, BASE, "key"))
    assert metadata is None or expect_plain(metadata[0])
    head = parsed(lambda: responses.head_info(answer, "key"))
    assert head is None or expect_plain(head)
    remaining = parsed(lambda: responses.remaining(answer, BASE))
    assert remaining is None or all(len(code) <= 80 for code in remaining.values())


def expect_plain(info: ObjectInfo) -> bool:
    """Whether size, age and tag are within their bounds."""
    is_age = info.age_s is None or info.age_s >= 0
    is_tag = len(info.tag) <= 258 and info.tag.isascii() and info.tag.isprintable()
    return 0 <= info.size_bytes <= BYTES_MAX and is_age and is_tag


@given(headers, bodies)
def test_headers_are_read_or_refused(fields: dict[str, str], body: bytes) -> None:
    etag = parsed(lambda: responses.etag_of(fields))
    assert etag is None or 0 < len(etag) <= 256
    parsed(lambda: responses.length_of(fields))
    line = responses.one_line(responses.reason_of(body), 200)
    assert len(line) <= 200
    assert line.isprintable()


INFOS = st.lists(st.tuples(text.filter(bool), st.integers(0, BYTES_MAX)), max_size=5)


@given(INFOS, st.one_of(st.none(), text.filter(lambda token: token.strip())))
def test_a_truncated_listing_is_detected(infos: list[tuple[str, int]], token: str | None) -> None:
    """A complete page is accepted; each proper prefix of it is refused."""
    wanted = ListedPage([ObjectInfo(key, size_bytes) for key, size_bytes in infos], [], token)
    items = "".join(
        element("Contents", element("Key", escape(BASE + key)) + element("Size", str(size_bytes)))
        for key, size_bytes in infos
    )
    more = "" if token is None else element("NextContinuationToken", escape(token))
    flag = element("IsTruncated", str(token is not None).lower())
    xml = element("ListBucketResult", flag + items + more).encode()
    page: dict[str, Any] = {"kind": "storage#objects"}
    if infos:
        page["items"] = [{"name": BASE + key, "size": str(size)} for key, size in infos]
    if token is not None:
        page["nextPageToken"] = token
    for body, parse in (
        (xml, responses.objects),
        (json.dumps(page).encode(), responses.json_objects),
    ):
        assert parse(Response(200, {}, body), BASE, "") == wanted
        for end in range(0, len(body), 1 + len(body) // 40):
            with pytest.raises(BoundsError):
                parse(Response(200, {}, body[:end]), BASE, "")


@given(st.lists(st.lists(st.integers(0, 20), max_size=6), max_size=8))
def test_a_listing_from_any_pages_names_each_key_once(pages: list[list[int]]) -> None:
    """In any order of keys, and with any repetition."""

    def page(token: str | None) -> Page:
        number = int(token or 0)
        infos = [ObjectInfo(f"key-{key}", key) for key in pages[number]] if pages else []
        return Page(infos, str(number + 1) if number + 1 < len(pages) else None)

    found = [info.size_bytes for info in listed("", page)]
    assert sorted(found) == sorted({key for keys_ in pages for key in keys_})


# ---------------------------------------------------------------- HTTP


class Split:
    """Returns bytes in pieces of at most the given lengths, then the end."""

    def __init__(self, data: bytes, lengths: list[int]) -> None:
        self._data = data
        self._lengths = itertools.cycle(lengths)

    def __call__(self, window: memoryview) -> int:
        count = min(next(self._lengths), window.nbytes, len(self._data))
        window[:count], self._data = self._data[:count], self._data[count:]
        return count


def read(
    data: bytes, lengths: list[int], method: str = "GET"
) -> tuple[int, Mapping[str, str], bytes]:
    reader = ResponseReader(Split(data, lengths), method)
    head = reader.head()
    if not head.has_end:
        raise Transient("no end")
    window = memoryview(bytearray(64))
    return head.status, head.headers, b"".join(bytes(p) for p in reader.pieces(head, window))


lengths = st.lists(st.integers(1, 50), min_size=1, max_size=4)
field_lines = st.one_of(
    st.sampled_from([
        b"Content-Length: 5", b"Content-Length: 99999999999999999", b"Content-Length: -1", b" folded",
        b"Content-Length: 5, 5", b"Transfer-Encoding: chunked", b"Transfer-Encoding: gzip, chunked",
        b"Connection: close", b":",
    ]),
    st.binary(max_size=30),
)  # fmt: skip
raw = st.one_of(
    st.binary(max_size=300),
    st.builds(
        lambda line, fields, body: b"\r\n".join([line, *fields, b"", body]),
        st.sampled_from(
            [b"HTTP/1.1 200 OK", b"HTTP/1.0 404", b"HTTP/1.1 100 Continue", b"HTTP/1.1 99", b"SSH-2.0"]
        ),
        st.lists(field_lines, max_size=5),
        st.one_of(
            st.binary(max_size=60),
            st.sampled_from([
                b"5\r\nhello\r\n0\r\n\r\n", b"5;x\r\nhello0\r\n\r\n", b"ffffffffffff\r\n", b"0\r\n" * 99,
            ]),
        ),
    ),
)  # fmt: skip


@given(raw, lengths, st.sampled_from(["GET", "HEAD", "PUT"]))
def test_http_is_read_or_transient(data: bytes, pieces: list[int], method: str) -> None:
    """Arbitrary bytes in arbitrary pieces give a response with bounded headers, or Transient."""
    try:
        status, fields, body = read(data, pieces, method)
    except Transient as error:
        reason = str(error)
    else:
        assert 200 <= status <= 599
        assert len(fields) <= HEADERS_MAX
        assert len(body) <= len(data)
        return
    assert len(reason) < 300


@given(st.binary(max_size=100), st.booleans(), lengths, st.data())
def test_a_truncated_response_is_detected(
    body: bytes, is_chunked: bool, pieces: list[int], data: st.DataObject
) -> None:
    """A complete response is accepted in any pieces; each proper prefix of it is Transient."""
    if is_chunked:
        framing = b"Transfer-Encoding: chunked"
        parts = [body[at : at + 7] for at in range(0, len(body), 7)]
        sent = b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts) + b"0\r\n\r\n"
    else:
        framing, sent = b"Content-Length: %d" % len(body), body
    whole = b"HTTP/1.1 200 OK\r\nETag: x\r\n" + framing + b"\r\n\r\n" + sent
    assert read(whole, pieces) == (200, read(whole, pieces)[1], body)
    cut = data.draw(st.integers(0, len(whole) - 1))
    with pytest.raises(Transient):
        read(whole[:cut], pieces)


# ---------------------------------------------------------------- whole stores


class FakeWire:
    """Answers all requests with the next of a few responses."""

    host = "store"

    def __init__(self, given_answers: list[Response]) -> None:
        self._answers = given_answers
        self._asked = 0

    def request(self, method: str, target: str, fields: object, **options: Any) -> Response:
        self._asked += 1
        if self._asked > 200:
            raise Transient("asked too often")
        answer = self._answers[self._asked % len(self._answers)]
        sink = options.get("sink")
        if sink is not None and answer.status in (200, 206):
            sink.rewind()
            if answer.body:
                sink.write(memoryview(answer.body))
        return answer

    def close(self) -> None:
        pass


def s3(wire: Any, scheme: str = "http") -> Any:
    store = store_at("s3://bucket/prefix", f"{scheme}://store", region="us-east-1")
    found = Credentials("a", "b")
    store._access._credentials.load = lambda: found
    store._access._found_route = lambda: Route(wire, f"{scheme}://store", "/bucket", "us-east-1")
    return store


def s3_tls(wire: Any) -> Any:
    """A store over TLS, whose bodies are not signed."""
    return s3(wire, "https")


def gcs(wire: Any) -> Any:
    store = store_at("gs://bucket/prefix", "http://store")
    store._access._wire = wire
    return store


def azure(wire: Any) -> Any:
    store = store_at("az://acct/box/prefix", "http://store/acct")
    store._access._credentials.load = lambda: SharedKey("acct", b"key")
    store._access._wire = wire
    return store


CALLS: dict[str, Callable[[Any], object]] = {
    "put": lambda store: store.put("key", b"abc", if_absent=True),
    "get": lambda store: store.get("key"),
    "get_range": lambda store: store.get_range("key", 0, 3, CountedSink()),
    "head": lambda store: store.head("key"),
    "list": lambda store: list(store.list("")),
    "delete": lambda store: store.delete("key"),
    "create": lambda store: store.create("key", Body(b"abc")),
    "check": lambda store: store.check(),
}


@given(
    st.sampled_from([s3, s3_tls, gcs, azure]),
    st.sampled_from(sorted(CALLS)),
    st.lists(said, min_size=1, max_size=4),
)
def test_every_call_ends_in_an_error_of_the_contract(
    make: Callable[[Any], Any], call: str, given_answers: list[Response]
) -> None:
    """A result, or a StoreError of one short line; no other exception and no endless loop."""
    try:
        CALLS[call](make(FakeWire(given_answers)))
    except StoreError as error:
        line = error.line()
    else:
        return
    assert len(line) < 1500
    assert line.isprintable()
