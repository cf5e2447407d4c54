#include "engine/events.h"

#include <utility>

namespace pg_sdma {

EventPool::EventPool(std::shared_ptr<const DriverDevice> device) : device_(std::move(device)) {}

EventPool::~EventPool() {
  for (const driver::Event event : free_) device_->library->destroy_event(event);
}

std::shared_ptr<void> EventPool::record(driver::Stream stream) {
  driver::Event event = nullptr;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!free_.empty()) {
      event = free_.back();
      free_.pop_back();
    }
  }
  if (event == nullptr) {
    device_->must(device_->library->create_event, &event, driver::kNoTiming);
  }
  std::shared_ptr<void> recorded(event, [pool = shared_from_this()](driver::Event used) {
    std::lock_guard<std::mutex> lock(pool->mutex_);
    pool->free_.push_back(used);
  });
  device_->must(device_->library->record_event, event, stream);
  return recorded;
}

EventMarker::EventMarker(std::shared_ptr<EventPool> pool, std::shared_ptr<void> event)
    : pool_(std::move(pool)), event_(std::move(event)) {}

bool EventMarker::passed() {
  const DriverDevice& device = pool_->device();
  const driver::Library& library = *device.library;
  const auto current = device.enter();
  const driver::RelaxedCapture relaxed(library);
  const int result = library.query_event(event_.get());
  if (result == driver::kSuccess) return true;
  if (result == driver::kNotReady) return false;
  device.fail(library.query_event.name, result);
}

void EventMarker::caller_follows() {
  const DriverDevice& device = pool_->device();
  const auto current = device.enter();
  device.must(device.library->wait_event, device.current_stream(), event_.get(), 0);
}

}  // namespace pg_sdma
