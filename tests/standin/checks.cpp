// The CUDA engine on the stand-in, one check a run:
//
//   checks <driver> <name>     runs a check; fails by its exit status
//   checks list                names them
//   checks <driver> refusal    prints why the engine refuses device 0
#include <cstring>
#include <map>
#include <thread>

#include "group.h"

using namespace pg_sdma;
using namespace standin_test;

namespace {

std::string driver_path;
Stream caller = nullptr;
constexpr size_t kChunk = size_t{1} << 16;

std::shared_ptr<Engine> engine_on(int device) {
  auto engine = cuda_engine(device, driver_path, [] { return caller; });
  driver::Context context = nullptr;
  REQUIRE(driver::cuDevicePrimaryCtxRetain(&context, device) == 0);
  REQUIRE(driver::cuCtxPushCurrent_v2(context) == 0);
  REQUIRE(driver::cuStreamCreateWithPriority(&caller, driver::kNonBlocking, 0) == 0);
  return engine;
}

template <class Function>
std::string refusal(Function function) {
  try {
    function();
  } catch (const CannotShare& error) {
    return error.what();
  }
  return "";
}

bool has(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

// -- what one process exports

void allocations_are_exported_once() {
  const auto engine = engine_on(0);
  const Buffer buffer(4096);
  const Place whole = engine->publish(buffer.data(), 4096);
  const Place part = engine->publish(buffer.data() + 1000, 96);
  REQUIRE(whole.export_id == 1 && whole.offset == 0);
  REQUIRE(part.export_id == 1 && part.offset == 1000);
  REQUIRE(standin_calls("cuIpcGetMemHandle") == 1);
  REQUIRE(engine->ticket(1).bytes == 4096 && engine->ticket(1).descriptors == 0);
}

void freed_memory_is_another_export() {
  const auto engine = engine_on(0);
  auto buffer = std::make_unique<Buffer>(4096);
  const Address before = buffer->base();
  const uint64_t first = engine->publish(buffer->data(), 1).export_id;
  REQUIRE(engine->live(first));
  buffer.reset();
  REQUIRE(!engine->live(first));
  REQUIRE(has(refusal([&] { engine->ticket(first); }), "freed"));
  buffer = std::make_unique<Buffer>(4096);
  REQUIRE(buffer->base() == before);
  REQUIRE(engine->publish(buffer->data(), 1).export_id != first);
}

void memory_that_cannot_be_exported_says_why() {
  const auto engine = engine_on(0);
  const auto why = [&](const void* data, size_t bytes) {
    return refusal([&] { engine->publish(data, bytes); });
  };
  const Buffer buffer(4096);
  REQUIRE(has(why(buffer.data() + 4000, 97), "past its allocation"));
  char on_the_stack[64];
  REQUIRE(has(why(on_the_stack, 64), "not the device's"));
  Address managed = 0;
  REQUIRE(cuMemAllocManaged(&managed, 4096, 1) == 0);
  REQUIRE(has(why(reinterpret_cast<void*>(managed), 8), "managed"));
  const auto other = engine_on(1);
  const Buffer elsewhere(4096);
  REQUIRE(has(why(elsewhere.data(), 8), "memory of device 1 on device 0"));
}

void chunks_are_exported_as_far_as_tensors_touch_them() {
  const auto engine = engine_on(0);
  const Buffer segment(5 * kChunk, kChunk, 0);
  const Place place = engine->publish(segment.data() + kChunk + 10, 2 * kChunk);
  const Ticket ticket = engine->ticket(place.export_id);
  REQUIRE(place.offset == 10 && ticket.descriptors == 3 && ticket.bytes == 3 * kChunk);
  const Place inside = engine->publish(segment.data() + 3 * kChunk, 5);
  REQUIRE(inside.export_id == place.export_id && inside.offset == 2 * kChunk);
  REQUIRE(engine->publish(segment.data(), 5).export_id != place.export_id);
}

void a_replaced_chunk_is_another_export() {
  const auto engine = engine_on(0);
  Buffer segment(3 * kChunk, kChunk, 0);
  const uint64_t before = engine->publish(segment.data(), 3 * kChunk).export_id;
  segment.unmap_chunk(1);
  segment.map_chunk(1, 0);
  REQUIRE(engine->publish(segment.data(), 5).export_id == before);  // it touches only chunk 0
  REQUIRE(!engine->live(before));
  REQUIRE(engine->publish(segment.data(), 3 * kChunk).export_id != before);
}

// -- two processes: rank 0 owns, rank 1 imports

struct Told {
  char identity[128];
  Ticket ticket;
};

// Rank 0 tells what it has published and waits; rank 1 acts on it.
void owner_and_importer(const std::function<Place(Engine&)>& publish,
                        const std::function<void(Engine&, const Told&)>& act,
                        const std::function<void()>& before_acting = [] {}) {
  int told[2];
  int done[2];
  REQUIRE(pipe(told) == 0 && pipe(done) == 0);
  const auto rank_body = [&](int rank) {
    Told message{};
    char byte = 0;
    if (rank == 0) {
      close(done[1]);
      const auto engine = engine_on(0);
      const Place place = publish(*engine);
      message.ticket = engine->ticket(place.export_id);
      engine->identity().copy(message.identity, sizeof message.identity - 1);
      before_acting();
      REQUIRE(write(told[1], &message, sizeof message) == sizeof message);
      REQUIRE(read(done[0], &byte, 1) == 0);  // rank 1 has ended
    } else {
      if (const char* fail = std::getenv("IMPORTER_FAIL")) setenv("STANDIN_FAIL", fail, 1);
      REQUIRE(read(told[0], &message, sizeof message) == sizeof message);
      act(*engine_on(1), message);
      REQUIRE(standin_mapped() == 0);
    }
  };
  REQUIRE(run_ranks(2, rank_body, [&] { close(done[1]); }) == 0);
}

std::unique_ptr<Buffer> owned;  // of rank 0

Place publish_allocation(Engine& engine) {
  owned = std::make_unique<Buffer>(4096);
  std::memset(owned->data(), 7, 4096);
  return engine.publish(owned->data(), 4096);
}

Place publish_chunks(Engine& engine, size_t count) {
  owned = std::make_unique<Buffer>(count * kChunk, kChunk, 0);
  for (size_t i = 0; i < count; ++i) owned->data()[i * kChunk] = static_cast<unsigned char>(i);
  return engine.publish(owned->data(), count * kChunk);
}

void groups_share_one_mapping() {
  owner_and_importer(publish_allocation, [](Engine& engine, const Told& told) {
    const Mapping first = engine.open(told.identity, told.ticket);
    const Mapping second = engine.open(told.identity, told.ticket);
    REQUIRE(first.base == second.base && first.bytes == 4096);
    REQUIRE(standin_calls("cuIpcOpenMemHandle_v2") == 1);
    engine.close(first);
    REQUIRE(*reinterpret_cast<unsigned char*>(second.base) == 7);
    engine.close(second);
  });
}

void many_chunks_arrive_in_order() {
  owner_and_importer([](Engine& engine) { return publish_chunks(engine, 200); },
                     [](Engine& engine, const Told& told) {
                       const Mapping mapping = engine.open(told.identity, told.ticket);
                       for (size_t i = 0; i < 200; ++i) {
                         const auto* chunk = reinterpret_cast<unsigned char*>(mapping.base);
                         REQUIRE(chunk[i * kChunk] == static_cast<unsigned char>(i));
                       }
                       engine.close(mapping);
                     });
}

void chunks_freed_before_they_are_opened_are_refused() {
  owner_and_importer([](Engine& engine) { return publish_chunks(engine, 3); },
                     [](Engine& engine, const Told& told) {
                       const std::string why =
                           refusal([&] { engine.open(told.identity, told.ticket); });
                       REQUIRE(has(why, "freed"));
                     },
                     [] {
                       owned->unmap_chunk(2);
                       owned->map_chunk(2, 0);
                     });
}

void the_descriptors_of_another_process_are_refused() {
  owner_and_importer([](Engine& engine) { return publish_chunks(engine, 3); },
                     [](Engine& engine, const Told& told) {
                       std::string identity = told.identity;  // "<uuid> <process> <socket>"
                       const size_t process = identity.find(' ') + 1;
                       identity.replace(process, identity.find(' ', process) - process, "1");
                       const std::string why = refusal([&] { engine.open(identity, told.ticket); });
                       REQUIRE(has(why, "the socket of process 1 is process"));
                     });
}

// With IMPORTER_FAIL, which is the importer's STANDIN_FAIL.
void an_import_that_fails_leaves_nothing_mapped() {
  owner_and_importer([](Engine& engine) { return publish_chunks(engine, 3); },
                     [](Engine& engine, const Told& told) {
                       const std::string why =
                           refusal([&] { engine.open(told.identity, told.ticket); });
                       REQUIRE(has(why, "cannot be opened on device 1") && has(why, "999"));
                     });
}

// -- queues

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

bool soon(const std::function<bool()>& condition) {
  for (int i = 0; i < 5000; ++i) {
    if (condition()) return true;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return false;
}

void a_program_is_ordered_between_the_callers_work() {
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

void long_batches_are_split() {
  const auto engine = engine_on(0);
  Counters counters;
  const auto queue = engine->queue(counters.page(), 4096);
  Program program;
  for (uint64_t i = 0; i < 600; ++i) program.push_back(Step::write(counters[i % 500], i));
  queue->run(program, no_waiter);
  REQUIRE(soon([&] { return counters[99] == 599; }));
  for (uint64_t i = 100; i < 500; ++i) REQUIRE(counters[i] == i);
}

void events_are_used_again() {
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

void a_queue_that_waits_for_ever_does_not_hold_its_end() {
  const auto engine = engine_on(0);
  auto* counters = new Counters;  // the device goes on looking at it
  const auto start = std::chrono::steady_clock::now();
  {
    const auto queue = engine->queue(counters->page(), 4096);
    queue->run({Step::wait((*counters)[0], 1)}, no_waiter);
  }
  REQUIRE(std::chrono::steady_clock::now() - start < std::chrono::seconds(20));
}

void another_threads_capture_survives() {
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

void the_callers_capture_is_seen() {
  const auto engine = engine_on(0);
  REQUIRE(!engine->capturing());
  REQUIRE(cuStreamBeginCapture_v2(caller, 2) == 0);
  REQUIRE(engine->capturing());
  void* graph = nullptr;
  REQUIRE(cuStreamEndCapture(caller, &graph) == 0);
}

void threads_keep_the_context_they_had() {
  const auto engine = engine_on(0);
  const Buffer buffer(4096);
  std::thread([&] {
    REQUIRE(engine->publish(buffer.data(), 8).export_id == 1);
    driver::Context current = nullptr;
    REQUIRE(driver::cuCtxGetCurrent(&current) == 0 && current == nullptr);
  }).join();
}

// -- devices

void links_are_told_apart() {
  const auto engine = engine_on(0);
  const auto other = engine_on(1);
  const char* set = std::getenv("STANDIN_LINK");
  const std::map<std::string, Link> links{
      {"nvlink", Link::kNvlink}, {"pcie", Link::kPcie}, {"none", Link::kNone}};
  REQUIRE(engine->link_to(other->identity()) == links.at(set == nullptr ? "nvlink" : set));
  REQUIRE(engine->link_to(engine->identity()) == Link::kSameDevice);
  REQUIRE(engine->link_to("0123 1 elsewhere") == Link::kNone);
  REQUIRE(has(refusal([&] { engine->link_to("4711"); }), "not a CUDA engine"));
}

void groups_share_one_engine() {
  REQUIRE(engine_on(0) == engine_on(0));
  REQUIRE(engine_on(0) != engine_on(1));
}

#define CHECK(name) {#name, name}
const std::map<std::string, void (*)()> checks{
    CHECK(allocations_are_exported_once),
    CHECK(freed_memory_is_another_export),
    CHECK(memory_that_cannot_be_exported_says_why),
    CHECK(chunks_are_exported_as_far_as_tensors_touch_them),
    CHECK(a_replaced_chunk_is_another_export),
    CHECK(groups_share_one_mapping),
    CHECK(many_chunks_arrive_in_order),
    CHECK(chunks_freed_before_they_are_opened_are_refused),
    CHECK(the_descriptors_of_another_process_are_refused),
    CHECK(an_import_that_fails_leaves_nothing_mapped),
    CHECK(a_program_is_ordered_between_the_callers_work),
    CHECK(long_batches_are_split),
    CHECK(events_are_used_again),
    CHECK(a_queue_that_waits_for_ever_does_not_hold_its_end),
    CHECK(another_threads_capture_survives),
    CHECK(the_callers_capture_is_seen),
    CHECK(threads_keep_the_context_they_had),
    CHECK(links_are_told_apart),
    CHECK(groups_share_one_engine),
};

}  // namespace

int main(int argc, char** argv) {
  if (argc == 2 && std::string(argv[1]) == "list") {
    for (const auto& [name, check] : checks) std::puts(name.c_str());
    return 0;
  }
  REQUIRE(argc == 3);
  driver_path = argv[1];
  if (std::string(argv[2]) == "refusal") {
    std::puts(refusal([] { engine_on(0); }).c_str());
    return 0;
  }
  checks.at(argv[2])();
  std::_Exit(0);  // queues that wait for ever have threads
}
