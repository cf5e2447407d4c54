// A device's events: order between its streams, and what a host looks at.
#pragma once

#include <memory>
#include <mutex>
#include <vector>

#include "engine/driver.h"
#include "engine/driver_device.h"
#include "engine/engine.h"

namespace pg_sdma {

// Events that have no timing, used again and again.
class EventPool : public std::enable_shared_from_this<EventPool> {
 public:
  explicit EventPool(std::shared_ptr<const DriverDevice> device);
  ~EventPool();

  // An event recorded on `stream`. It returns to the pool with the last reference: a wait that was
  // enqueued on it keeps what was recorded. Throws driver::Failure.
  std::shared_ptr<void> record(driver::Stream stream);

  const DriverDevice& device() const { return *device_; }

 private:
  std::shared_ptr<const DriverDevice> device_;
  std::mutex mutex_;
  std::vector<driver::Event> free_;
};

class EventMarker final : public Queue::Marker {
 public:
  EventMarker(std::shared_ptr<EventPool> pool, std::shared_ptr<void> event);

  bool passed() override;
  void caller_follows() override;

 private:
  std::shared_ptr<EventPool> pool_;
  std::shared_ptr<void> event_;
};

}  // namespace pg_sdma
