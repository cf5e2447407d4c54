// The calls of a DelegatingBackend that move no tensors: groups made from this one, its state and
// life.

#include <utility>

#include "backend/delegating.h"

namespace pg_sdma {

using c10d::Backend;

OptionsPtr DelegatingBackend::getBackendOptions() {
  return main_lane().inner().getBackendOptions();
}

// Groups made from this one

bool DelegatingBackend::supportsSplitting() const {
  return main_lane().inner().supportsSplitting();
}

bool DelegatingBackend::supportsShrinking() const {
  return main_lane().inner().supportsShrinking();
}

// `opts` are of the main inner's type; another inner gets its own with the call's name and timeout.
OptionsPtr DelegatingBackend::options_for(Backend& inner, const OptionsPtr& opts) const {
  if (!opts || &inner == &main_lane().inner()) return opts;
#if PG_SDMA_TORCH_AT_LEAST(2, 14)
  OptionsPtr own = inner.getBackendOptions()->clone();
#else
  OptionsPtr own = inner.getBackendOptions();
#endif
  own->group_name = opts->group_name;
  own->timeout = opts->timeout;
  return own;
}

BackendPtr DelegatingBackend::split(const StorePtr& store, const std::vector<int>& ranks,
                                    const OptionsPtr& opts) {
  Inners parts;
  for (const auto& [device, lane] : lanes_) {
    Backend& inner = lane->inner();
    // Null on the ranks that `ranks` leaves out.
    if (BackendPtr part = inner.split(store, ranks, options_for(inner, opts))) {
      parts.emplace(device, std::move(part));
    }
  }
  return parts.empty() ? nullptr : wrap(store, opts, parts);
}

BackendPtr DelegatingBackend::merge(const StorePtr& store, const OptionsPtr& opts, const int& rank,
                                    const int& size) {
  Inners merged;
  for (const auto& [device, lane] : lanes_) {
    Backend& inner = lane->inner();
    merged.emplace(device, inner.merge(store, options_for(inner, opts), rank, size));
  }
  return wrap(store, opts, merged);
}

// The main inner's alone, as torch shrinks one backend of a group.
BackendPtr DelegatingBackend::shrink(const std::vector<int64_t>& ranks_to_exclude, int flags,
                                     const OptionsPtr& opts) {
  BackendPtr rest = main_lane().inner().shrink(ranks_to_exclude, flags, opts);
  return rest ? wrap(nullptr, opts, {{lanes_.front().first, std::move(rest)}}) : nullptr;
}

// State and life of the group

void DelegatingBackend::setTimeout(std::chrono::milliseconds timeout) {
  for (const auto& [device, lane] : lanes_) {
    lane->set_timeout(timeout);
    lane->inner().setTimeout(timeout);
  }
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
  for (const auto& [device, lane] : lanes_) {
    if (lane->forked()) continue;
    lane->abort();
    lane->inner().abort();
  }
}

void DelegatingBackend::shutdown() {
  for (const auto& [device, lane] : lanes_) {
    if (lane->forked()) continue;
    lane->shutdown();
    lane->inner().shutdown();
  }
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
void DelegatingBackend::addEphemeralTimeout(const std::chrono::milliseconds& timeout) {
  for (const auto& [device, lane] : lanes_) lane->inner().addEphemeralTimeout(timeout);
}

void DelegatingBackend::setBoundDeviceId(std::optional<at::Device> device) {
  Backend::setBoundDeviceId(device);
  for (const auto& [served, lane] : lanes_) lane->inner().setBoundDeviceId(device);
}

bool DelegatingBackend::supportsWindow() const { return main_lane().inner().supportsWindow(); }

c10::intrusive_ptr<c10d::Window> DelegatingBackend::new_window(
    const std::optional<at::Tensor>& tensor) {
  Lane& lane = tensor ? lane_for(__func__, tensor->device().type()) : main_lane();
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
