// Order on the device, captures, contexts, links.
#include <cstring>
#include <map>
#include <thread>

#include "checks.h"

using namespace pg_sdma;
using namespace standin_test;

namespace {

class NoWaiter final : public Waiter {
  void wait(Counter&, uint64_t) override {}
  void wrote() override {}
};
NoWaiter no_waiter;

class Counters {
 public:
  Counters() {
    page_ = mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    REQUIRE(page_ != MAP_FAILED);
  }
  ~Counters() { munmap(page_, 4096); }
  Counter& operator[](size_t index) { return static_cast<Counter*>(page_)[index]; }
  void* page() { return page_; }

 private:
  void* page_;
};

CHECK(a_program_is_ordered_between_the_callers_work) {
  const auto engine = engine_on(0);
  Counters counters;
  const auto queue = engine->queue(counters.page(), 4096);
  const Buffer first(64), second(64), third(64), fourth(64);
  std::memset(first.data(), 9, 64);
  // Held up at its start, so that only the order on the device can make it right.
  Counters gates;
  const auto holder = engine->queue(gates.page(), 4096);
  holder->run({Step::wait(gates[0], 1)}, no_waiter);
  holder->caller_follows();
  REQUIRE(driver::cuMemcpyAsync(second.base(), first.base(), 64, caller) == 0);
  queue->follow_caller();
  queue->run({Step::write(counters[0], 1), Step::wait(counters[1], 5),
              Step::copy(third.data(), 0, second.base(), 64), Step::write(counters[0], 2)},
             no_waiter);
  queue->caller_follows();
  REQUIRE(driver::cuMemcpyAsync(fourth.base(), third.base(), 64, caller) == 0);
  const auto end = queue->mark();
  gates[0] = 1;
  REQUIRE(soon([&] { return counters[0] == 1; }));
  REQUIRE(!end->passed());
  counters[1] = 6;
  REQUIRE(soon([&] { return end->passed(); }));
  REQUIRE(cuStreamSynchronize(caller) == 0);
  REQUIRE(counters[0] == 2 && fourth.data()[63] == 9);
}

CHECK(programs_run_on_the_callers_stream) {
  const auto engine = engine_on(0);
  Counters counters;
  const auto queue = engine->queue(counters.page(), 4096);
  queue->use_callers_stream();
  const long waits = standin_calls("cuStreamWaitEvent");
  for (uint64_t i = 1; i <= 10; ++i) {
    queue->use_callers_stream();
    queue->run({Step::wait(counters[1], i), Step::write(counters[0], i)}, no_waiter);
    queue->caller_follows();
  }
  REQUIRE(standin_calls("cuStreamWaitEvent") == waits);
  const auto end = queue->mark();
  // What the caller enqueues later is not the queue's.
  Counters gates;
  const auto holder = engine->queue(gates.page(), 4096);
  holder->run({Step::wait(gates[0], 1)}, no_waiter);
  holder->caller_follows();
  counters[1] = 9;
  REQUIRE(soon([&] { return counters[0] == 9; }));
  REQUIRE(!end->passed());
  counters[1] = 10;
  REQUIRE(soon([&] { return end->passed(); }));
  gates[0] = 1;
  REQUIRE(cuStreamSynchronize(caller) == 0);
}

// Each program must wait for the one before it, although no caller's stream does.
CHECK(programs_keep_their_order_over_all_streams) {
  const auto engine = engine_on(0);
  Counters counters;
  const auto queue = engine->queue(counters.page(), 4096);
  Stream streams[2] = {caller, nullptr};
  REQUIRE(driver::cuStreamCreateWithPriority(&streams[1], driver::kNonBlocking, 0) == 0);
  // 0 and 1: that caller's stream; 2: the queue's own, called from stream 1.
  const auto turn_to = [&](int where) {
    caller = streams[where % 2];
    if (where == 2) {
      queue->follow_caller();
    } else {
      queue->use_callers_stream();
    }
  };
  uint64_t number = 0;
  for (const auto& [from, to] : {std::pair{2, 0}, {0, 1}, {1, 0}, {0, 2}, {2, 2}, {0, 0}}) {
    ++number;
    turn_to(from);
    queue->run({Step::wait(counters[1], number)}, no_waiter);
    turn_to(to);
    queue->run({Step::write(counters[0], number)}, no_waiter);
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    REQUIRE(counters[0] == number - 1);
    counters[1] = number;
    REQUIRE(soon([&] { return counters[0] == number; }));
  }
  caller = streams[0];
}

CHECK(long_batches_are_split) {
  const auto engine = engine_on(0);
  Counters counters;
  const auto queue = engine->queue(counters.page(), 4096);
  Program program;
  for (uint64_t i = 0; i < 600; ++i) program.push_back(Step::write(counters[i % 500], i));
  queue->run(program, no_waiter);
  REQUIRE(soon([&] { return counters[99] == 599; }));
  for (uint64_t i = 100; i < 500; ++i) REQUIRE(counters[i] == i);
}

CHECK(events_are_used_again) {
  const auto engine = engine_on(0);
  Counters counters;
  const auto queue = engine->queue(counters.page(), 4096);
  const long before = standin_calls("cuEventCreate");
  for (int i = 0; i < 100; ++i) {
    queue->follow_caller();
    queue->caller_follows();
    queue->mark();
  }
  REQUIRE(standin_calls("cuEventCreate") - before <= 2);
}

CHECK(a_queue_that_waits_for_ever_does_not_hold_its_end) {
  const auto engine = engine_on(0);
  auto* counters = new Counters;  // the device goes on looking at it
  const auto start = std::chrono::steady_clock::now();
  {
    const auto queue = engine->queue(counters->page(), 4096);
    queue->run({Step::wait((*counters)[0], 1)}, no_waiter);
  }
  REQUIRE(std::chrono::steady_clock::now() - start < std::chrono::seconds(20));
}

// Peers do not wait for this rank's copy of its own shard. Here a wait is what takes long beside.
CHECK(only_the_end_waits_for_what_runs_beside) {
  const auto engine = engine_on(0);
  const Buffer from(64), to(64);
  for (const bool on_callers : {false, true}) {
    Counters counters;
    const auto queue = engine->queue(counters.page(), 4096);
    std::memset(to.data(), 0, 64);
    std::memset(from.data(), 3, 64);
    if (on_callers) queue->use_callers_stream();
    queue->run(
        {Step::wait(counters[0], 1).on(Step::kBeside),
         Step::copy(to.data(), 0, from.base(), 32).on(1),
         Step::copy(to.data() + 32, 0, from.base() + 32, 32).on(2), Step::write(counters[1], 1)},
        no_waiter);
    const auto end = queue->mark();
    REQUIRE(soon([&] { return counters[1] == 1; }));
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    REQUIRE(!end->passed());
    counters[0] = 1;
    REQUIRE(soon([&] { return end->passed(); }));
    REQUIRE(std::memcmp(to.data(), from.data(), 64) == 0);
  }
}

CHECK(what_runs_beside_comes_after_the_steps_before_it) {
  const auto engine = engine_on(0);
  Counters counters;
  const auto queue = engine->queue(counters.page(), 4096);
  queue->run({Step::write(counters[1], 1).on(Step::kBeside), Step::wait(counters[0], 1),
              Step::write(counters[1], 2).on(Step::kBeside)},
             no_waiter);
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  REQUIRE(counters[1] == 1);
  counters[0] = 1;
  REQUIRE(soon([&] { return counters[1] == 2; }));
}

// Here too.
CHECK(what_runs_beside_holds_up_no_batch_on_any_stream) {
  const auto engine = engine_on(0);
  const Buffer from(64), to(64);
  const Stream made = caller;
  int value = 0;
  for (const Stream stream : {made, Stream{nullptr}, reinterpret_cast<Stream>(1)}) {  // the default
    caller = stream;
    Counters counters;
    const auto queue = engine->queue(counters.page(), 4096);
    std::memset(from.data(), ++value, 64);
    queue->use_callers_stream();
    queue->run({Step::wait(counters[0], 1).on(Step::kBeside),
                Step::copy(to.data(), 0, from.base(), 32).on(1),
                Step::copy(to.data() + 32, 0, from.base() + 32, 32).on(1),
                Step::write(counters[1], 1).on(1)},
               no_waiter);
    const auto end = queue->mark();
    REQUIRE(soon([&] { return counters[1] == 1; }));
    REQUIRE(!end->passed());
    counters[0] = 1;
    REQUIRE(soon([&] { return end->passed(); }));
    REQUIRE(std::memcmp(to.data(), from.data(), 64) == 0);
  }
  caller = made;
}

CHECK(a_program_that_fails_half_way_leaves_nothing_to_the_next) {
  const auto engine = engine_on(0);
  const Buffer from(64), to(64);
  Counters counters;
  const auto queue = engine->queue(counters.page(), 4096);
  queue->use_callers_stream();
  std::memset(from.data(), 5, 64);
  bool failed = false;
  try {
    queue->run({Step::copy(to.data(), 0, 8, 32).on(Step::kBeside),
                Step::copy(to.data(), 0, from.base(), 64).on(1), Step::write(counters[0], 1)},
               no_waiter);
  } catch (const std::runtime_error&) {
    failed = true;
  }
  REQUIRE(failed);
  queue->run({Step::copy(to.data() + 1, 0, from.base(), 1), Step::write(counters[0], 2)},
             no_waiter);
  const auto end = queue->mark();
  REQUIRE(soon([&] { return end->passed(); }));
  REQUIRE(counters[0] == 2);
  REQUIRE(to.data()[0] == 0 && to.data()[1] == 5 && to.data()[2] == 0);
}

// The stand-in ends the process of who unregisters memory that a stream still waits on.
CHECK(a_queue_outlasts_what_a_failed_program_left_beside) {
  const auto engine = engine_on(0);
  const Buffer to(64);
  auto* counters = new Counters;  // the device goes on looking at it
  {
    const auto queue = engine->queue(counters->page(), 4096);
    queue->use_callers_stream();
    bool failed = false;
    try {
      queue->run({Step::wait((*counters)[0], 1).on(Step::kBeside),
                  Step::copy(to.data(), 0, 8, 32).on(1), Step::write((*counters)[1], 1)},
                 no_waiter);
    } catch (const std::runtime_error&) {
      failed = true;
    }
    REQUIRE(failed);
  }
  REQUIRE((*counters)[1] == 0);
  (*counters)[0] = 1;  // freeing memory waits for all streams
}

CHECK(another_threads_capture_survives) {
  const auto engine = engine_on(0);
  const Buffer buffer(4096);
  engine->publish(buffer.data(), 8);
  Counters counters;
  Stream captured = nullptr;
  REQUIRE(driver::cuStreamCreateWithPriority(&captured, driver::kNonBlocking, 0) == 0);
  REQUIRE(cuStreamBeginCapture_v2(captured, 0) == 0);
  std::thread([&] {
    const Buffer* fresh = &buffer;
    engine->publish(fresh->data(), 8);
    const auto queue = engine->queue(counters.page(), 4096);
    queue->follow_caller();
    queue->run({Step::write(counters[0], 3)}, no_waiter);
    const auto end = queue->mark();
    REQUIRE(soon([&] { return end->passed(); }));
    queue->caller_follows();
  }).join();
  void* graph = nullptr;
  REQUIRE(cuStreamEndCapture(captured, &graph) == 0);
}

CHECK(the_callers_capture_is_seen) {
  const auto engine = engine_on(0);
  REQUIRE(!engine->capturing());
  REQUIRE(cuStreamBeginCapture_v2(caller, 2) == 0);
  REQUIRE(engine->capturing());
  void* graph = nullptr;
  REQUIRE(cuStreamEndCapture(caller, &graph) == 0);
}

CHECK(threads_keep_the_context_they_had) {
  const auto engine = engine_on(0);
  const Buffer buffer(4096);
  std::thread([&] {
    REQUIRE(engine->publish(buffer.data(), 8).export_id == 1);
    driver::Context current = nullptr;
    REQUIRE(driver::cuCtxGetCurrent(&current) == 0 && current == nullptr);
  }).join();
}

// -- devices

CHECK(links_are_told_apart) {
  const auto engine = engine_on(0);
  const auto other = engine_on(1);
  const char* set = std::getenv("STANDIN_LINK");
  const std::map<std::string, Link> links{
      {"nvlink", Link::kFabric}, {"pcie", Link::kPcie}, {"none", Link::kNone}};
  REQUIRE(engine->link_to(other->identity()) == links.at(set == nullptr ? "nvlink" : set));
  REQUIRE(engine->link_to(engine->identity()) == Link::kSameDevice);
  REQUIRE(engine->link_to("0123 1 elsewhere") == Link::kNone);
  REQUIRE(has(refusal([&] { engine->link_to("4711"); }), "not a GPU's"));
}

CHECK(groups_share_one_engine) {
  REQUIRE(engine_on(0) == engine_on(0));
  REQUIRE(engine_on(0) != engine_on(1));
}

}  // namespace
