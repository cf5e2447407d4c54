// A c10d backend that hands every operation to the backend it wraps, lane by lane.
//
// Every virtual of c10d::Backend is overridden: one that is not would throw "does not support ..."
// for an operation the inner has. tests/unit/test_virtuals.py holds this list to torch's header.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "backend/lane.h"
#include "torch_version.h"

namespace pg_sdma {

using BackendPtr = c10::intrusive_ptr<c10d::Backend>;
using OptionsPtr = c10::intrusive_ptr<c10d::Backend::Options>;
using StorePtr = c10::intrusive_ptr<c10d::Store>;
using Inners = std::unordered_map<c10::DeviceType, BackendPtr>;

class DelegatingBackend : public c10d::Backend {
 public:
  // `inners`: what carries the operations on tensors of each device type; one or two entries, none
  // null, all of this group's rank and size.
  DelegatingBackend(std::shared_ptr<const Group> group, const Inners& inners);

  const std::string getBackendName() const override { return "sdma"; }
  OptionsPtr getBackendOptions() override;

  // The inner that serves tensors of `device`. Throws when there is none.
  BackendPtr inner(c10::DeviceType device) const;
  // The inner that calls without tensors go to: the accelerator's where there is one, else the
  // cpu's.
  BackendPtr main_inner() const;

  // Collectives: issued on the lane of their tensors.
  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& opts) override;
  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& opts) override;
  WorkPtr allreduce_sparse(Tensors& tensors, const c10d::AllreduceOptions& opts) override;
  WorkPtr allreduce_coalesced(Tensors& tensors,
                              const c10d::AllreduceCoalescedOptions& opts) override;
  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& opts) override;
  WorkPtr allgather(TensorLists& outputs, Tensors& inputs,
                    const c10d::AllgatherOptions& opts) override;
  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input,
                          const c10d::AllgatherOptions& opts) override;
  WorkPtr allgather_coalesced(TensorLists& outputs, Tensors& inputs,
                              const c10d::AllgatherOptions& opts) override;
  WorkPtr allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::AllgatherOptions& opts) override;
  WorkPtr gather(TensorLists& outputs, Tensors& inputs, const c10d::GatherOptions& opts) override;
  WorkPtr scatter(Tensors& outputs, TensorLists& inputs, const c10d::ScatterOptions& opts) override;
  WorkPtr reduce_scatter(Tensors& outputs, TensorLists& inputs,
                         const c10d::ReduceScatterOptions& opts) override;
  WorkPtr _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                               const c10d::ReduceScatterOptions& opts) override;
  WorkPtr reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::ReduceScatterOptions& opts) override;
  WorkPtr alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_splits,
                        std::vector<int64_t>& input_splits,
                        const c10d::AllToAllOptions& opts) override;
  WorkPtr alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& opts) override;
  WorkPtr barrier(const c10d::BarrierOptions& opts) override;
  void monitoredBarrier(const c10d::BarrierOptions& opts, bool wait_all_ranks) override;

  // Point-to-point: straight to the inner, never in the chain.
  WorkPtr send(Tensors& tensors, int destination, int tag) override;
  WorkPtr recv(Tensors& tensors, int source, int tag) override;
  WorkPtr recvAnysource(Tensors& tensors, int tag) override;

  bool supportsCoalescing() const override;
  void startCoalescing() override;
  WorkPtr endCoalescing() override;

  // Groups made from this one.
  bool supportsSplitting() const override;
  bool supportsShrinking() const override;
  BackendPtr split(const StorePtr& store, const std::vector<int>& ranks,
                   const OptionsPtr& opts) override;
  BackendPtr merge(const StorePtr& store, const OptionsPtr& opts, const int& rank,
                   const int& size) override;
  BackendPtr shrink(const std::vector<int64_t>& ranks_to_exclude, int flags,
                    const OptionsPtr& opts) override;

  // State and life of the group.
  void setTimeout(std::chrono::milliseconds timeout) override;
  void setGroupUid(const std::string& uid) override;
  void setSequenceNumberForGroup() override;
  uint64_t getSequenceNumberForGroup() override;
  void eagerConnectSingleDevice(at::Device device) override;
  void abort() override;
  void shutdown() override;
  c10d::ErrorType getError() override;

  // Timing, hooks, memory.
  bool supportsTimeEstimation() const override;
  void enableCollectivesTiming() override;
  void registerOnCompletionHook(
      std::function<void(std::shared_ptr<c10d::WorkInfo>)>&& hook) override;
  void waitForPendingWorks() override;
  std::shared_ptr<c10::Allocator> getMemAllocator() override;
  at::Tensor allocateTensor(long size, at::TensorOptions options) override;
  bool supportsTensorAlloc(c10::DeviceIndex device) override;

#if PG_SDMA_TORCH_AT_LEAST(2, 13)
  void suspend() override;
  void resume() override;
  std::unordered_map<std::string, uint64_t> getMemoryStats() override;
#endif

#if PG_SDMA_TORCH_AT_LEAST(2, 14)
  // torch 2.14 renamed five collectives and lets each name forward to the other. The older names
  // are the ones implemented here, for every version alike; the new ones end there too.
  WorkPtr all_gather_single(at::Tensor& output, at::Tensor& input,
                            const c10d::AllgatherOptions& opts) final {
    return _allgather_base(output, input, opts);
  }
  WorkPtr all_gather_single_coalesced(Tensors& outputs, Tensors& inputs,
                                      const c10d::AllgatherOptions& opts) final {
    return allgather_into_tensor_coalesced(outputs, inputs, opts);
  }
  WorkPtr reduce_scatter_single(at::Tensor& output, at::Tensor& input,
                                const c10d::ReduceScatterOptions& opts) final {
    return _reduce_scatter_base(output, input, opts);
  }
  WorkPtr reduce_scatter_single_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::ReduceScatterOptions& opts) final {
    return reduce_scatter_tensor_coalesced(outputs, inputs, opts);
  }
  WorkPtr all_to_all_single(at::Tensor& output, at::Tensor& input,
                            std::vector<int64_t>& output_splits, std::vector<int64_t>& input_splits,
                            const c10d::AllToAllOptions& opts) final {
    return alltoall_base(output, input, output_splits, input_splits, opts);
  }
  WorkPtr gather_single(at::Tensor& output, at::Tensor& input,
                        const c10d::GatherOptions& opts) final {
    return gather_into_tensor(output, input, opts);
  }
  WorkPtr gather_into_tensor(at::Tensor& output, at::Tensor& input,
                             const c10d::GatherOptions& opts) override;

  void addEphemeralTimeout(const std::chrono::milliseconds& timeout) override;
  void setBoundDeviceId(std::optional<at::Device> device) override;
  bool supportsWindow() const override;
  c10::intrusive_ptr<c10d::Window> new_window(const std::optional<at::Tensor>& tensor) override;
  void registerAbortHook(int64_t id, c10d::AbortHook hook) override;
  void unregisterAbortHook(int64_t id) override;
#endif

 protected:
  // Makes the backend of a group that came out of a split, merge or shrink of the inners. `store`
  // and `opts` are those of the call; a shrink has no store.
  virtual BackendPtr wrap(const StorePtr& store, const OptionsPtr& opts, const Inners& inners) = 0;

  // The lane that serves tensors of `device`. Throws when there is none.
  Lane& lane_for(const char* operation, c10::DeviceType device) const;
  // The lane of main_inner().
  Lane& main_lane() const { return *lanes_.front().second; }
  const std::vector<std::pair<c10::DeviceType, std::unique_ptr<Lane>>>& lanes() const {
    return lanes_;
  }
  const Group& group() const { return *group_; }

  // True between startCoalescing and endCoalescing.
  bool coalescing_ = false;
  // Returns `work`, which `lane` was given; where another lane coalesces, endCoalescing waits for
  // it too.
  WorkPtr keep(const Lane& lane, WorkPtr work);

 private:
  // The lane of the first tensor among `arguments`, the main lane when they hold none.
  template <class... Arguments>
  Lane& lane_of(const char* operation, const Arguments&... arguments) const;
  // A collective: on the lane of its tensors, in the lane's chain.
  template <class Method, class... Arguments>
  WorkPtr issue(const char* operation, Method method, Arguments&... arguments);
  // A point-to-point call: straight to the inner of its tensors' lane.
  template <class Method, class... Arguments>
  WorkPtr pass(const char* operation, Method method, Tensors& tensors, Arguments... arguments);
  OptionsPtr options_for(c10d::Backend& inner, const OptionsPtr& opts) const;

  const std::shared_ptr<const Group> group_;
  std::vector<std::pair<c10::DeviceType, std::unique_ptr<Lane>>> lanes_;  // an accelerator's first
  // torch does not say for which device it starts to coalesce, so the main lane does. What other
  // lanes were given meanwhile runs at once, and the Work of endCoalescing waits for it too.
  std::vector<WorkPtr> beside_coalescing_;
};

}  // namespace pg_sdma
