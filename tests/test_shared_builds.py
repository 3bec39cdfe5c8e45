"""Builds on several processes of torchrun: the bundle of one process, to the bit, and one message when a build fails."""

from __future__ import annotations

import json

import pytest
from ranks import started
from support import Built, contents, finish, partials, run, start, tiny_recipe, torchrun

from trtconvert import pipeline
from trtconvert.bundle import read_manifest
