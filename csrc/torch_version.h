// The torch this build is against, for the few places where c10d differs between versions.
#pragma once

#include <torch/headeronly/version.h>

#define PG_SDMA_TORCH_AT_LEAST(major, minor) \
  (TORCH_VERSION_MAJOR > (major) ||          \
   (TORCH_VERSION_MAJOR == (major) && TORCH_VERSION_MINOR >= (minor)))
