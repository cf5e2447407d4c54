// The c10d face of pg_sdma: takes the operations that PG_SDMA_OPS names, hands every other one to
// the inner.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "backend/collectives/gather.h"
#include "backend/collectives/reduce_scatter.h"
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
  WorkPtr _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                               const c10d::ReduceScatterOptions& opts) override;
  WorkPtr reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::ReduceScatterOptions& opts) override;
  WorkPtr reduce_scatter(Tensors& outputs, TensorLists& inputs,
                         const c10d::ReduceScatterOptions& opts) override;

  std::vector<Stats::Row> stats() const;

  // What carries the direct calls of each lane: Lane::way().
  std::map<std::string, std::string> ways() const;

  // Ends this rank's part in the transports, once what is pending has ended, and leaves the inners
  // alone: what is still safe at interpreter exit. Of all groups side by side.
  static void detach(const std::vector<SdmaBackend*>& backends);

 protected:
  BackendPtr wrap(const StorePtr& store, const OptionsPtr& opts, const Inners& inners) override;

 private:
  WorkPtr all_gather(Gather::Form form, const Tensors& outputs, const Tensors& inputs,
                     const c10d::AllgatherOptions& opts);
  WorkPtr reduce_scatter(ReduceScatter::Form form, const Tensors& outputs, const Tensors& inputs,
                         const c10d::ReduceScatterOptions& opts);
  WorkPtr run(const char* operation, std::shared_ptr<Collective> collective,
              std::chrono::milliseconds timeout);
};

}  // namespace pg_sdma
