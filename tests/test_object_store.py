"""The store that tests of buckets use: its forms of requests, and its faults.

Source: https://cloud.google.com/storage/docs/json_api/v1/objects
"""

import http.client
import json
import math
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
  path = "/storage/v1/b/bkt/o/a"
  for method, query, expected in (
    ("GET", dict(ifGenerationMatch=second), 200),
    ("GET", dict(generation=second), 200),
    ("GET", dict(ifGenerationMatch=first), 412),
    ("GET", dict(generation=first), 404),
    ("GET", dict(ifGenerationNotMatch=second), 304),
    ("GET", dict(ifMetagenerationMatch=2), 412),
    ("DELETE", dict(ifGenerationMatch=first), 412),
    ("DELETE", dict(ifGenerationMatch=second), 204),
    ("GET", {}, 404),
  ):
    assert client.ask(method, path, **query)[0] == expected, query


def test_faults_that_are_answered(client, store):
  store.faults.share_503, store.faults.share_429 = 0.3, 0.2
  statuses = [client.upload("a", b"x")[0] for _ in range(200)]
  # Binomial: 60 and 40 expected, standard deviations of 6.5 and 5.7.
  assert 40 < statuses.count(503) < 80 and 20 < statuses.count(429) < 60
  assert set(statuses) == {200, 429, 503}
  store.faults = object_store.Faults(outage_until=math.inf)
  assert client.ask("GET", "/storage/v1/b/bkt")[0] == 503
  store.faults = object_store.Faults(refuse_writes=True)
  path = "/storage/v1/b/bkt/o/a"
  assert client.upload("a", b"y")[0] == 403
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
