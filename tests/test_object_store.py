"""The store that tests of buckets use: its forms of requests, and its faults.

Source: https://cloud.google.com/storage/docs/json_api/v1/objects
"""

import http.client
import json
import socket
import time
import urllib.parse

import object_store
import pytest


class Client:
  """Makes requests to a store by HTTP/1.1."""

  def __init__(self, port: int):
    self.port = port

  def ask(self, method, path, body=b"", headers=None, **query):
    """Returns (status, headers, body, parsed if it is JSON)."""
    connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=20)
    if query:
      path += "?" + urllib.parse.urlencode(query)
    connection.request(method, path, body, headers or {})
    answer = connection.getresponse()
    data = answer.read()
    connection.close()
    if "json" in answer.headers.get("Content-Type", ""):
      data = json.loads(data)
    return answer.status, answer.headers, data

  def upload(self, name, data, **query):
    path = "/upload/storage/v1/b/bkt/o"
    query = {"uploadType": "media", "name": name, **query}
    return self.ask("POST", path, data, **query)

  def get(self, name, headers=None, **query):
    name = urllib.parse.quote(name, safe="")
    path = f"/storage/v1/b/bkt/o/{name}"
    return self.ask("GET", path, b"", headers, alt="media", **query)[2]


@pytest.fixture(scope="module")
def server():
  with object_store.Server(object_store.Store(), ("127.0.0.1", 0)) as server:
    yield server
    server.shutdown()


@pytest.fixture
def store(server):
  server.store = object_store.Store("bkt")
  return server.store


@pytest.fixture
def client(server, store):
  return Client(server.server_address[1])


def test_upload_in_one_request(client):
  status, _, about = client.upload("a/b c.txt", b"text")
  assert status == 200 and about["size"] == "4"
  assert about["name"] == "a/b c.txt"
  assert client.get("a/b c.txt") == b"text"
  # The XML API's address of the same object.
  assert client.ask("GET", "/bkt/a/b%20c.txt")[2] == b"text"
  assert client.ask("GET", "/bkt/a%2Fb%20c.txt")[2] == b"text"


@pytest.mark.parametrize("data", [b"", b"\r\n--b\nx\x00\r\n\r\n", b"\n" * 9])
def test_upload_in_parts_of_one_body(client, data):
  about = json.dumps({"name": "m", "contentType": "image/png"}).encode()
  body = b"--bb\r\nContent-Type: application/json\r\n\r\n" + about
  body += b"\r\n--bb\r\nContent-Type: image/png\r\n\r\n" + data
  body += b"\r\n--bb--\r\n"
  kind = {"Content-Type": 'multipart/related; boundary="bb"'}
  path = "/upload/storage/v1/b/bkt/o?uploadType=multipart"
  status, _, stored = client.ask("POST", path, body, kind)
  assert status == 200 and stored["contentType"] == "image/png"
  assert client.get("m") == data


def start(client, **query):
  path = "/upload/storage/v1/b/bkt/o"
  query = {"uploadType": "resumable", "name": "r", **query}
  status, headers, _ = client.ask("POST", path, **query)
  assert status == 200
  place = urllib.parse.urlsplit(headers["Location"])
  assert place.netloc == f"127.0.0.1:{client.port}"
  return f"{place.path}?{place.query}"


def part(client, place, data, span):
  return client.ask("PUT", place, data, {"Content-Range": f"bytes {span}"})


def test_upload_that_is_resumed(client):
  place = start(client)
  status, headers, _ = part(client, place, b"", "*/6")
  assert status == 308 and "Range" not in headers
  status, headers, _ = part(client, place, b"abc", "0-2/*")
  assert (status, headers["Range"]) == (308, "bytes=0-2")
  assert client.ask("GET", "/storage/v1/b/bkt/o/r")[0] == 404  # not yet whole
  assert part(client, place, b"f", "5-5/6")[0] == 400  # a gap
  status, _, about = part(client, place, b"cdef", "2-5/6")  # c again
  assert status == 200 and about["size"] == "6"
  assert part(client, place, b"", "*/6")[2] == about  # asked again
  assert client.get("r") == b"abcdef"


def test_chunks_are_read_whatever_the_length_says(client):
  # As TensorFlow's curl sends them.
  place = start(client)
  with socket.create_connection(("127.0.0.1", client.port)) as s:
    s.sendall(
      f"PUT {place} HTTP/1.1\r\nHost: x\r\nContent-Length: 4\r\n".encode()
      + b"Transfer-Encoding: chunked\r\nContent-Range: bytes 0-9/10\r\n\r\n"
      + b"4\r\nabcd\r\n6\r\nefghij\r\n0\r\n\r\n"
    )
    assert b"200" in s.recv(1000).splitlines()[0]
  assert client.get("r") == b"abcdefghij"


@pytest.mark.parametrize(
  "span,expected",
  [("2-4", b"cde"), ("7-", b"hij"), ("-2", b"ij"), ("5-99", b"fghij")],
)
def test_range(client, span, expected):
  client.upload("a", b"abcdefghij")
  path = "/storage/v1/b/bkt/o/a?alt=media"
  answer = client.ask("GET", path, b"", {"Range": f"bytes={span}"})
  behind = client.ask("GET", "/bkt/a", b"", {"Range": "bytes=10-"})
  assert behind[0] == 416
  first = b"abcdefghij".index(expected)
  span = f"bytes {first}-{first + len(expected) - 1}/10"
  assert answer[0] == 206 and answer[2] == expected
  assert answer[1]["Content-Range"] == span


def test_conditions(client):
  def upload(want):
    status, _, about = client.upload("a", b"x", ifGenerationMatch=want)
    return status, about.get("generation")

  status, first = upload(0)  # only if there is none
  assert status == 200
  assert upload(0)[0] == 412
  status, second = upload(first)
  assert status == 200 and int(second) > int(first)
  assert upload(first)[0] == 412

  def read(**query):
    return client.ask("GET", "/storage/v1/b/bkt/o/a", **query)[0]

  assert read(ifGenerationMatch=second) == read(generation=second) == 200
  assert read(ifGenerationMatch=first) == 412
  assert read(generation=first) == 404
  assert read(ifGenerationNotMatch=second) == 304
  assert read(ifMetagenerationMatch=2) == 412
  path = "/storage/v1/b/bkt/o/a"
  assert client.ask("DELETE", path, ifGenerationMatch=first)[0] == 412
  assert client.ask("DELETE", path, ifGenerationMatch=second)[0] == 204
  assert read() == 404


def listed(client, **query):
  """Returns names and prefixes of all pages, and the number of pages."""
  names, prefixes, pages, token = [], [], 0, {}
  while True:
    page = client.ask("GET", "/storage/v1/b/bkt/o", **query, **token)[2]
    names += [item["name"] for item in page.get("items", [])]
    prefixes += page.get("prefixes", [])
    pages += 1
    if "nextPageToken" not in page:
      return names, prefixes, pages
    token = {"pageToken": page["nextPageToken"]}


@pytest.mark.parametrize("size,pages", [(1, 4), (3, 2), (100, 1)])
def test_list(client, size, pages):
  every = ["a", "d/a", "d/b/c", "d/b/d", "d/e", "é"]
  for name in reversed(every):
    client.upload(name, b"")
  assert listed(client, maxResults=size)[0] == every
  found = listed(client, maxResults=size, delimiter="/")
  assert found == (["a", "é"], ["d/"], -(-3 // size))
  found = listed(client, maxResults=size, delimiter="/", prefix="d/")
  assert found == (["d/a", "d/e"], ["d/b/"], -(-3 // size))
  assert listed(client, prefix="d/")[0] == every[1:5]
  assert listed(client, prefix="nothing") == ([], [], 1)


def test_faults_that_are_answered(client, store):
  store.faults.share_503, store.faults.share_429 = 0.3, 0.2
  statuses = [client.upload("a", b"x")[0] for _ in range(200)]
  # Binomial: 60 and 40 expected, standard deviations of 6.5 and 5.7.
  assert 40 < statuses.count(503) < 80 and 20 < statuses.count(429) < 60
  assert set(statuses) == {200, 429, 503}
  store.faults = object_store.Faults(outage_until=time.time() + 60)
  assert client.ask("GET", "/storage/v1/b/bkt")[0] == 503
  store.faults = object_store.Faults(refuse_writes=True)
  assert client.get("a") == b"x"
  assert client.upload("a", b"y")[0] == 403
  path = "/storage/v1/b/bkt/o/a"
  assert client.ask("DELETE", path)[0] == 403
  assert client.get("a") == b"x"


@pytest.mark.parametrize("fault,is_done", [("dropped", False), ("lost", True)])
def test_faults_without_an_answer(client, store, fault, is_done):
  setattr(store.faults, f"share_{fault}", 1.0)
  with pytest.raises(ConnectionError):
    client.upload("a", b"x")
  assert ("a" in store.buckets["bkt"]) == is_done


@pytest.mark.skipif(
  not object_store.available(), reason="no network namespace can be made"
)
def test_a_command_in_the_namespace(tmp_path):
  with object_store.Bucket("b1") as bucket:
    bucket.put("a/b", b"abc")
    code = """
import os, ssl, urllib.request
trust = ssl.create_default_context(cafile=os.environ["CURL_CA_BUNDLE"])
url = "https://storage.googleapis.com/b1/a/b"
print(urllib.request.urlopen(url, context=trust).read())
url = os.environ["TENSORSTORE_GCS_HTTP_URL"] + "/storage/v1/b/b1/o"
print(len(urllib.request.urlopen(url).read()) > 9)
try:
  urllib.request.urlopen("http://1.1.1.1", timeout=5)
except OSError as e:
  print(e.reason.errno)
"""
    done = bucket.run(["python3", "-c", code], capture_output=True, text=True)
    assert done.stdout.split("\n") == ["b'abc'", "True", "101", ""], done
    assert bucket.counts() == {"read": 1, "list": 1, "all": 2}
    bucket.reset()
    bucket.upload(tmp_path, "x")  # the tests' own requests are not counted
    bucket.download("a", tmp_path)
    assert (tmp_path / "b").read_bytes() == b"abc"
    assert bucket.counts() == {"all": 0}
