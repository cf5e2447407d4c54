// A queue on a stream of its own, or on its caller's. Waits and writes are the driver's stream
// memory operations on the control page, copies its asynchronous copies. Launches go to a second
// stream, made at the first.
#pragma once

#include <array>
#include <cstddef>
#include <memory>
#include <vector>

#include "engine/driver.h"
#include "engine/driver_device.h"
#include "engine/engine.h"

namespace pg_sdma {

class EventPool;

class StreamQueue final : public Queue {
 public:
  // Throws driver::Failure.
  StreamQueue(std::shared_ptr<const DriverDevice> device, void* page, size_t bytes);
  ~StreamQueue() override;

  void follow_caller() override;
  void use_callers_stream() override;
  void follow(void* stream) override;
  bool caller_records() const override;
  void run(const Program& program, Waiter& waiter) override;
  void caller_follows() override;
  std::shared_ptr<Marker> mark() override;
  std::shared_ptr<Marker> mark_caller() override;

 private:
  std::shared_ptr<void> end() const;
  void use(driver::Stream stream);
  void wait_for(driver::Stream stream);
  void note(const Step& step);
  void note_copy(const Step& step);
  driver::Stream make_stream();
  void enqueue_on_side(const Step& step);
  void enqueue(const Program& program);
  void forget_noted();
  void flush();
  void flush_copies();
  void enqueue_batch();
  void turn_to(uint32_t track);
  bool drained();

  std::shared_ptr<const DriverDevice> device_;
  std::shared_ptr<EventPool> events_;
  void* page_;
  size_t bytes_;
  driver::Address page_on_device_ = 0;
  driver::Stream own_ = nullptr;
  driver::Stream stream_ = nullptr;   // that programs run on now: own_ or a caller's
  std::shared_ptr<void> end_;         // of the last program, where that ran on a caller's
  driver::Stream side_ = nullptr;     // of launches
  driver::Stream batches_ = nullptr;  // of batches of copies, for a stream that takes none
  // Tracks above 0 spread over stream_ and these, the last of which is kBeside's; `at_` is the
  // stream that steps go to.
  struct Branch {
    driver::Stream stream = nullptr;
    bool forked = false;  // goes on from fork_
    bool joined = true;   // stream_ is behind all of it: kBeside's, at the program's end
  };
  std::vector<Branch> branches_;
  Branch* branch_of(uint32_t track);  // null: stream_
  driver::Stream stream_of(Branch& branch);
  void join(Branch& branch);
  driver::Stream at_ = nullptr;
  uint32_t track_ = 0;
  std::shared_ptr<void> fork_;  // where branches start, until they are joined
  std::vector<std::shared_ptr<void>> marks_;
  // Noted, and not yet enqueued: there is never some of both.
  std::vector<driver::MemoryOperation> operations_;
  std::vector<driver::Address> destinations_;
  std::vector<driver::Address> sources_;
  std::vector<size_t> sizes_;
};

}  // namespace pg_sdma
