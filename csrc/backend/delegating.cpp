#include "backend/delegating.h"

#include <c10/util/Exception.h>

#include <algorithm>

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

DelegatingBackend::DelegatingBackend(int rank, int size, const Inners& inners)
    : Backend(rank, size) {
  TORCH_CHECK_VALUE(!inners.empty(), "[rank ", rank, "] sdma wraps at least one backend, got none");
  for (const auto& [device, inner] : inners) {
    TORCH_CHECK_VALUE(inner, "[rank ", rank, "] sdma got no backend to wrap for ", device);
    TORCH_CHECK_VALUE(inner->getRank() == rank && inner->getSize() == size, "[rank ", rank,
                      "] sdma is rank ", rank, " of ", size, ", but the backend to wrap for ",
                      device, " is rank ", inner->getRank(), " of ", inner->getSize());
    lanes_.emplace_back(device, std::make_unique<Lane>(inner));
  }
  std::sort(lanes_.begin(), lanes_.end(),
            [](const auto& a, const auto& b) { return b.first == c10::kCPU && a.first != b.first; });
}

Lane& DelegatingBackend::lane_for(const char* operation, c10::DeviceType device) const {
  for (const auto& [served, lane] : lanes_) {
    if (served == device) return *lane;
  }
  std::string devices;
  for (const auto& [served, lane] : lanes_) {
    devices += c10::str(devices.empty() ? "" : ", ", served);
  }
  TORCH_CHECK(false, "[rank ", rank_, "] sdma ", operation, ": the tensors are on ", device,
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
  return lane_of(operation, arguments...).issue(method, arguments...);
}

BackendPtr DelegatingBackend::inner(c10::DeviceType device) const {
  return BackendPtr::reclaim_copy(&lane_for("inner", device).inner());
}

BackendPtr DelegatingBackend::main_inner() const {
  return BackendPtr::reclaim_copy(&main_lane().inner());
}

OptionsPtr DelegatingBackend::getBackendOptions() { return main_lane().inner().getBackendOptions(); }

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
  return issue(__func__, &Backend::allgather_coalesced, outputs, inputs, opts);
}

WorkPtr DelegatingBackend::allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                           const c10d::AllgatherOptions& opts) {
  return issue(__func__, &Backend::allgather_into_tensor_coalesced, outputs, inputs, opts);
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

WorkPtr DelegatingBackend::barrier(const c10d::BarrierOptions& opts) {
  Lane& lane = opts.device ? lane_for(__func__, opts.device->type()) : main_lane();
  return lane.issue(&Backend::barrier, opts);
}

// Only gloo has one, so the lane of cpu tensors comes first.
void DelegatingBackend::monitoredBarrier(const c10d::BarrierOptions& opts, bool wait_all_ranks) {
  lanes_.back().second->inner().monitoredBarrier(opts, wait_all_ranks);
}

// Point-to-point

WorkPtr DelegatingBackend::send(Tensors& tensors, int destination, int tag) {
  return lane_of(__func__, tensors).inner().send(tensors, destination, tag);
}

WorkPtr DelegatingBackend::recv(Tensors& tensors, int source, int tag) {
  return lane_of(__func__, tensors).inner().recv(tensors, source, tag);
}

WorkPtr DelegatingBackend::recvAnysource(Tensors& tensors, int tag) {
  return lane_of(__func__, tensors).inner().recvAnysource(tensors, tag);
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
  return main_lane().inner().endCoalescing();
}

// Groups made from this one

bool DelegatingBackend::supportsSplitting() const {
  return main_lane().inner().supportsSplitting();
}

bool DelegatingBackend::supportsShrinking() const {
  return main_lane().inner().supportsShrinking();
}

template <class Derive>
BackendPtr DelegatingBackend::derive(const StorePtr& store, const OptionsPtr& opts,
                                     Derive derive_inner) {
  Inners derived;
  for (const auto& [device, lane] : lanes_) {
    if (BackendPtr inner = derive_inner(lane->inner())) derived.emplace(device, std::move(inner));
  }
  return derived.empty() ? nullptr : wrap(store, opts, derived);
}

BackendPtr DelegatingBackend::split(const StorePtr& store, const std::vector<int>& ranks,
                                    const OptionsPtr& opts) {
  return derive(store, opts, [&](Backend& inner) { return inner.split(store, ranks, opts); });
}

BackendPtr DelegatingBackend::merge(const StorePtr& store, const OptionsPtr& opts, const int& rank,
                                    const int& size) {
  return derive(store, opts, [&](Backend& inner) { return inner.merge(store, opts, rank, size); });
}

BackendPtr DelegatingBackend::shrink(const std::vector<int64_t>& ranks_to_exclude, int flags,
                                     const OptionsPtr& opts) {
  return derive(nullptr, opts,
                [&](Backend& inner) { return inner.shrink(ranks_to_exclude, flags, opts); });
}

// State and life of the group

void DelegatingBackend::setTimeout(std::chrono::milliseconds timeout) {
  for (const auto& [device, lane] : lanes_) lane->inner().setTimeout(timeout);
}

void DelegatingBackend::setGroupUid(const std::string& uid) {
  Backend::setGroupUid(uid);
  for (const auto& [device, lane] : lanes_) lane->inner().setGroupUid(uid);
}

void DelegatingBackend::setSequenceNumberForGroup() {
  for (const auto& [device, lane] : lanes_) lane->inner().setSequenceNumberForGroup();
}

uint64_t DelegatingBackend::getSequenceNumberForGroup() {
  return main_lane().inner().getSequenceNumberForGroup();
}

void DelegatingBackend::eagerConnectSingleDevice(at::Device device) {
  Backend& inner = lane_for(__func__, device.type()).inner();
  inner.setBoundDeviceId(device);
  inner.eagerConnectSingleDevice(device);
}

void DelegatingBackend::abort() {
  for (const auto& [device, lane] : lanes_) lane->inner().abort();
}

void DelegatingBackend::shutdown() {
  for (const auto& [device, lane] : lanes_) lane->inner().shutdown();
}

c10d::ErrorType DelegatingBackend::getError() { return main_lane().inner().getError(); }

// Timing, hooks, memory

bool DelegatingBackend::supportsTimeEstimation() const {
  return main_lane().inner().supportsTimeEstimation();
}

void DelegatingBackend::enableCollectivesTiming() {
  for (const auto& [device, lane] : lanes_) lane->inner().enableCollectivesTiming();
}

void DelegatingBackend::registerOnCompletionHook(
    std::function<void(std::shared_ptr<c10d::WorkInfo>)>&& hook) {
  onCompletionHook_ = hook;  // what hasHooks() reads; the inner is who calls it
  main_lane().inner().registerOnCompletionHook(std::move(hook));
}

void DelegatingBackend::waitForPendingWorks() { main_lane().inner().waitForPendingWorks(); }

std::shared_ptr<c10::Allocator> DelegatingBackend::getMemAllocator() {
  return main_lane().inner().getMemAllocator();
}

at::Tensor DelegatingBackend::allocateTensor(long size, at::TensorOptions options) {
  return lane_for(__func__, options.device().type()).inner().allocateTensor(size, options);
}

bool DelegatingBackend::supportsTensorAlloc(c10::DeviceIndex device) {
  return main_lane().inner().supportsTensorAlloc(device);
}

#if PG_SDMA_TORCH_AT_LEAST(2, 13)
void DelegatingBackend::suspend() { main_lane().inner().suspend(); }

void DelegatingBackend::resume() { main_lane().inner().resume(); }

std::unordered_map<std::string, uint64_t> DelegatingBackend::getMemoryStats() {
  return main_lane().inner().getMemoryStats();
}
#endif

#if PG_SDMA_TORCH_AT_LEAST(2, 14)
WorkPtr DelegatingBackend::gather_into_tensor(at::Tensor& output, at::Tensor& input,
                                              const c10d::GatherOptions& opts) {
  return issue(__func__, &Backend::gather_into_tensor, output, input, opts);
}

void DelegatingBackend::addEphemeralTimeout(const std::chrono::milliseconds& timeout) {
  for (const auto& [device, lane] : lanes_) lane->inner().addEphemeralTimeout(timeout);
}

void DelegatingBackend::setBoundDeviceId(std::optional<at::Device> device) {
  Backend::setBoundDeviceId(device);
  main_lane().inner().setBoundDeviceId(device);
}

bool DelegatingBackend::supportsWindow() const { return main_lane().inner().supportsWindow(); }

c10::intrusive_ptr<c10d::Window> DelegatingBackend::new_window(
    const std::optional<at::Tensor>& tensor) {
  Lane& lane = tensor ? lane_of(__func__, *tensor) : main_lane();
  return lane.inner().new_window(tensor);
}

void DelegatingBackend::registerAbortHook(int64_t id, c10d::AbortHook hook) {
  main_lane().inner().registerAbortHook(id, std::move(hook));
}

void DelegatingBackend::unregisterAbortHook(int64_t id) {
  main_lane().inner().unregisterAbortHook(id);
}
#endif

}  // namespace pg_sdma
