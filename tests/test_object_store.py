"""The store that tests of buckets use: its conditions, and its network.

Source: https://cloud.google.com/storage/docs/json_api/v1/objects
"""

import http.client
import json
import urllib.parse

import object_store
import pytest

OBJECT = "/storage/v1/b/bkt/o/a"


@pytest.fixture
def store():
  return object_store.Store("bkt")


@pytest.fixture
def ask(store):
  """Returns a function that makes a request: (status, body)."""
  server = object_store.Server(store)

  def ask(method, path, body=b"", **query):
    client = http.client.HTTPConnection(*server.server_address, timeout=20)
    client.request(method, f"{path}?{urllib.parse.urlencode(query)}", body)
    answer = client.getresponse()
    data = answer.read()
    client.close()
    is_json = "json" in answer.headers.get("Content-Type", "")
    return answer.status, json.loads(data) if is_json else data

  yield ask
  server.shutdown()
  server.server_close()


def upload(ask, data, **query):
  path = "/upload/storage/v1/b/bkt/o"
  return ask("POST", path, data, uploadType="media", name="a", **query)


def test_conditions(ask):
  status, about = upload(ask, b"x", ifGenerationMatch=0)  # if there is none
  first = about["generation"]
  assert status == 200 and upload(ask, b"x", ifGenerationMatch=0)[0] == 412
  status, about = upload(ask, b"y", ifGenerationMatch=first)
  second = about["generation"]
  assert status == 200 and int(second) > int(first)
  for method, query, expected in (
    ("GET", dict(ifGenerationMatch=second), 200),
    ("GET", dict(generation=first), 404),
    ("GET", dict(ifGenerationNotMatch=second), 304),
    ("DELETE", dict(ifGenerationMatch=first), 412),
    ("DELETE", dict(ifGenerationMatch=second), 204),
    ("GET", {}, 404),
  ):
    assert ask(method, OBJECT, **query)[0] == expected, query


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
"""
    done = bucket.run(["python3", "-c", code], capture_output=True, text=True)
    assert done.stdout.split("\n") == ["b'abc'", "True", ""], done
    assert bucket.counts() == {"read": 1, "list": 1, "all": 2}
    bucket.download("a", tmp_path)
    assert (tmp_path / "b").read_bytes() == b"abc"
