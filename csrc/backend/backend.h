// The c10d face of pg_sdma: takes the all-gather family, hands every other operation to the inner.
#pragma once

#include "backend/delegating.h"

namespace pg_sdma {

class SdmaBackend final : public DelegatingBackend {
 public:
  using DelegatingBackend::DelegatingBackend;
};

}  // namespace pg_sdma
