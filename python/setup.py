# SPDX-License-Identifier: Apache-2.0
"""The wheel holds a shared library of this platform, and nothing that depends on the version of Python."""

from setuptools import setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.dist import Distribution


class PlatformDistribution(Distribution):
    """Goes where packages with compiled parts go."""

    def has_ext_modules(self):
        return True


class PlatformWheel(bdist_wheel):
    """Any Python 3, this platform."""

    def get_tag(self):
        return "py3", "none", super().get_tag()[2]


setup(distclass=PlatformDistribution, cmdclass={"bdist_wheel": PlatformWheel})
