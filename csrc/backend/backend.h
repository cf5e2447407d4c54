// The c10d face of pg_sdma: takes the all-gather family, hands every other operation to the inner.
#pragma once

#include <memory>
#include <vector>

#include "backend/delegating.h"

namespace pg_sdma {

class SdmaBackend final : public DelegatingBackend {
 public:
  using DelegatingBackend::DelegatingBackend;

  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input,
                          const c10d::AllgatherOptions& opts) override;
  WorkPtr allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::AllgatherOptions& opts) override;
  WorkPtr allgather(TensorLists& outputs, Tensors& inputs,
                    const c10d::AllgatherOptions& opts) override;

  std::vector<Stats::Row> stats() const;

  // Ends this rank's part in the transports without the peers and without the inners: what is
  // still safe at interpreter exit.
  void detach();

 protected:
  BackendPtr wrap(const StorePtr& store, const OptionsPtr& opts, const Inners& inners) override;

 private:
  WorkPtr all_gather(Gather::Form form, const Tensors& outputs, const Tensors& inputs,
                     const c10d::AllgatherOptions& opts);
};

}  // namespace pg_sdma
