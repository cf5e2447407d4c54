// A queue on a stream of its own. Waits and writes are the driver's stream memory operations on the
// control page, copies its asynchronous copies.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <vector>

#include "engine/driver.h"
#include "engine/engine.h"

namespace pg_sdma {

// One device of the driver as the engine's parts share it.
struct DriverDevice {
  std::shared_ptr<const driver::Library> library;
  driver::Context context = nullptr;
  int ordinal = 0;
  // The calling thread's current stream on the device, as torch sees it.
  std::function<driver::Stream()> current_stream;

  driver::ContextGuard enter() const { return {*library, context}; }
};

class EventPool;

class StreamQueue final : public Queue {
 public:
  // Throws driver::Failure.
  StreamQueue(std::shared_ptr<const DriverDevice> device, void* page, size_t bytes);
  ~StreamQueue() override;

  void follow_caller() override;
  void follow(void* stream) override;
  void run(const Program& program, Waiter& waiter) override;
  void caller_follows() override;
  void* native() const override { return stream_; }
  std::shared_ptr<Marker> mark() override;

 private:
  void note(const Step& step);
  void flush();
  bool drained();

  std::shared_ptr<const DriverDevice> device_;
  std::shared_ptr<EventPool> events_;
  void* page_;
  size_t bytes_;
  driver::Address page_on_device_ = 0;
  driver::Stream stream_ = nullptr;
  std::vector<driver::MemoryOperation> operations_;  // noted, and not yet enqueued
};

}  // namespace pg_sdma
