#include "backend/delegating.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <utility>

#include "backend/collectives/coalesced_gather.h"
#include "backend/order/joint_work.h"

namespace pg_sdma {
namespace {

using c10d::Backend;

const at::Tensor* first_tensor(const at::Tensor& tensor) {
  return tensor.defined() ? &tensor : nullptr;
}

const at::Tensor* first_tensor(const Tensors& tensors) {
  return tensors.empty() ? nullptr : first_tensor(tensors.front());
}

const at::Tensor* first_tensor(const TensorLists& lists) {
  for (const Tensors& list : lists) {
    if (const at::Tensor* tensor = first_tensor(list)) return tensor;
  }
  return nullptr;
}

template <class NoTensor>
const at::Tensor* first_tensor(const NoTensor&) {
  return nullptr;
}

}  // namespace

DelegatingBackend::DelegatingBackend(std::shared_ptr<const Group> group, const Inners& inners)
    : Backend(group->rank, group->size), group_(std::move(group)) {
  const int rank = rank_;
  const int size = size_;
  TORCH_CHECK_VALUE(!inners.empty(), "rank ", rank, ": sdma wraps at least one backend, got none");
  for (const auto& [device, inner] : inners) {
    TORCH_CHECK_VALUE(inner, "rank ", rank, ": sdma got no backend to wrap for ", device);
    TORCH_CHECK_VALUE(inner->getRank() == rank && inner->getSize() == size, "rank ", rank,
                      ": sdma is rank ", rank, " of ", size, ", but the backend to wrap for ",
                      device, " is rank ", inner->getRank(), " of ", inner->getSize());
    lanes_.emplace_back(device, std::make_unique<Lane>(group_, device, inner));
  }
  std::sort(lanes_.begin(), lanes_.end(), [](const auto& a, const auto& b) {
    return b.first == c10::kCPU && a.first != b.first;
  });
}

Lane& DelegatingBackend::lane_for(const char* operation, c10::DeviceType device) const {
  for (const auto& [served, lane] : lanes_) {
    if (served == device) return *lane;
  }
  std::string devices;
  for (const auto& [served, lane] : lanes_) {
    devices += c10::str(devices.empty() ? "" : ", ", served);
  }
  TORCH_CHECK(false, "rank ", rank_, ": ", operation, ": the tensors are on ", device,
              ", but this group serves ", devices,
              "; name a backend for that device in init_process_group, or move the tensors");
}

template <class... Arguments>
Lane& DelegatingBackend::lane_of(const char* operation, const Arguments&... arguments) const {
  const at::Tensor* tensor = nullptr;
  ((tensor = tensor ? tensor : first_tensor(arguments)), ...);
  return tensor ? lane_for(operation, tensor->device().type()) : main_lane();
}

template <class Method, class... Arguments>
WorkPtr DelegatingBackend::issue(const char* operation, Method method, Arguments&... arguments) {
  Lane& lane = lane_of(operation, arguments...);
  return keep(lane, lane.issue(operation, method, arguments...));
}

template <class Method, class... Arguments>
WorkPtr DelegatingBackend::pass(const char* operation, Method method, Tensors& tensors,
                                Arguments... arguments) {
  Lane& lane = lane_of(operation, tensors);
  lane.check_fork();
  return keep(lane, (lane.inner().*method)(tensors, arguments...));
}

WorkPtr DelegatingBackend::keep(const Lane& lane, WorkPtr work) {
  if (coalescing_ && work && &lane != &main_lane()) beside_coalescing_.push_back(work);
  return work;
}

BackendPtr DelegatingBackend::inner(c10::DeviceType device) const {
  return BackendPtr::reclaim_copy(&lane_for("inner", device).inner());
}

BackendPtr DelegatingBackend::main_inner() const {
  return BackendPtr::reclaim_copy(&main_lane().inner());
}

// Collectives

WorkPtr DelegatingBackend::broadcast(Tensors& tensors, const c10d::BroadcastOptions& opts) {
  return issue(__func__, &Backend::broadcast, tensors, opts);
}

WorkPtr DelegatingBackend::allreduce(Tensors& tensors, const c10d::AllreduceOptions& opts) {
  return issue(__func__, &Backend::allreduce, tensors, opts);
}

WorkPtr DelegatingBackend::allreduce_sparse(Tensors& tensors, const c10d::AllreduceOptions& opts) {
  return issue(__func__, &Backend::allreduce_sparse, tensors, opts);
}

WorkPtr DelegatingBackend::allreduce_coalesced(Tensors& tensors,
                                               const c10d::AllreduceCoalescedOptions& opts) {
  return issue(__func__, &Backend::allreduce_coalesced, tensors, opts);
}

WorkPtr DelegatingBackend::reduce(Tensors& tensors, const c10d::ReduceOptions& opts) {
  return issue(__func__, &Backend::reduce, tensors, opts);
}

WorkPtr DelegatingBackend::allgather(TensorLists& outputs, Tensors& inputs,
                                     const c10d::AllgatherOptions& opts) {
  return issue(__func__, &Backend::allgather, outputs, inputs, opts);
}

WorkPtr DelegatingBackend::_allgather_base(at::Tensor& output, at::Tensor& input,
                                           const c10d::AllgatherOptions& opts) {
  return issue(__func__, &Backend::_allgather_base, output, input, opts);
}

WorkPtr DelegatingBackend::allgather_coalesced(TensorLists& outputs, Tensors& inputs,
                                               const c10d::AllgatherOptions& opts) {
  return issue(__func__, &gather_into_lists, outputs, inputs, opts);
}

WorkPtr DelegatingBackend::allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                           const c10d::AllgatherOptions& opts) {
  return issue(__func__, &gather_into_tensors, outputs, inputs, opts);
}

WorkPtr DelegatingBackend::gather(TensorLists& outputs, Tensors& inputs,
                                  const c10d::GatherOptions& opts) {
  return issue(__func__, &Backend::gather, outputs, inputs, opts);
}

WorkPtr DelegatingBackend::scatter(Tensors& outputs, TensorLists& inputs,
                                   const c10d::ScatterOptions& opts) {
  return issue(__func__, &Backend::scatter, outputs, inputs, opts);
}

WorkPtr DelegatingBackend::reduce_scatter(Tensors& outputs, TensorLists& inputs,
                                          const c10d::ReduceScatterOptions& opts) {
  return issue(__func__, &Backend::reduce_scatter, outputs, inputs, opts);
}

WorkPtr DelegatingBackend::_reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                                const c10d::ReduceScatterOptions& opts) {
  return issue(__func__, &Backend::_reduce_scatter_base, output, input, opts);
}

WorkPtr DelegatingBackend::reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                           const c10d::ReduceScatterOptions& opts) {
  return issue(__func__, &Backend::reduce_scatter_tensor_coalesced, outputs, inputs, opts);
}

WorkPtr DelegatingBackend::alltoall_base(at::Tensor& output, at::Tensor& input,
                                         std::vector<int64_t>& output_splits,
                                         std::vector<int64_t>& input_splits,
                                         const c10d::AllToAllOptions& opts) {
  return issue(__func__, &Backend::alltoall_base, output, input, output_splits, input_splits, opts);
}

WorkPtr DelegatingBackend::alltoall(Tensors& outputs, Tensors& inputs,
                                    const c10d::AllToAllOptions& opts) {
  return issue(__func__, &Backend::alltoall, outputs, inputs, opts);
}

#if PG_SDMA_TORCH_AT_LEAST(2, 14)
WorkPtr DelegatingBackend::gather_into_tensor(at::Tensor& output, at::Tensor& input,
                                              const c10d::GatherOptions& opts) {
  return issue(__func__, &Backend::gather_into_tensor, output, input, opts);
}
#endif

WorkPtr DelegatingBackend::barrier(const c10d::BarrierOptions& opts) {
  Lane& lane = opts.device ? lane_for(__func__, opts.device->type()) : main_lane();
  return keep(lane, lane.issue(__func__, &Backend::barrier, opts));
}

// Only gloo has one, so the cpu's lane is asked where there is one.
void DelegatingBackend::monitoredBarrier(const c10d::BarrierOptions& opts, bool wait_all_ranks) {
  auto call = [](Backend& inner, const c10d::BarrierOptions& opts, bool wait_all_ranks) -> WorkPtr {
    inner.monitoredBarrier(opts, wait_all_ranks);
    return nullptr;
  };
  if (WorkPtr work = lanes_.back().second->issue("monitoredBarrier", call, opts, wait_all_ranks)) {
    work->wait();
  }
}

// Point-to-point

WorkPtr DelegatingBackend::send(Tensors& tensors, int destination, int tag) {
  return pass(__func__, &Backend::send, tensors, destination, tag);
}

WorkPtr DelegatingBackend::recv(Tensors& tensors, int source, int tag) {
  return pass(__func__, &Backend::recv, tensors, source, tag);
}

WorkPtr DelegatingBackend::recvAnysource(Tensors& tensors, int tag) {
  return pass(__func__, &Backend::recvAnysource, tensors, tag);
}

// Coalescing

bool DelegatingBackend::supportsCoalescing() const {
  return main_lane().inner().supportsCoalescing();
}

void DelegatingBackend::startCoalescing() {
  main_lane().inner().startCoalescing();
  coalescing_ = true;
}

WorkPtr DelegatingBackend::endCoalescing() {
  coalescing_ = false;
  std::vector<WorkPtr> works = std::exchange(beside_coalescing_, {});
  if (WorkPtr coalesced = main_lane().inner().endCoalescing()) works.push_back(coalesced);
  if (works.size() <= 1) return works.empty() ? nullptr : works.front();
  return c10::make_intrusive<JointWork>(std::move(works));
}

}  // namespace pg_sdma
