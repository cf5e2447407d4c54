// The c10d face of pg_sdma: takes the all-gather family, hands every other operation to the inner.
#pragma once

#include "backend/delegating.h"

namespace pg_sdma {

class SdmaBackend final : public DelegatingBackend {
 public:
  using DelegatingBackend::DelegatingBackend;

 protected:
  BackendPtr wrap(const StorePtr& store, const OptionsPtr& opts, const Inners& inners) override {
    const auto& inner = inners.begin()->second;
    return c10::make_intrusive<SdmaBackend>(inner->getRank(), inner->getSize(), inners);
  }
};

}  // namespace pg_sdma
