#include "transport/direct_transport.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <list>
#include <stdexcept>
#include <thread>
#include <utility>

#include "engine/inject.h"
#include "transport/health/messages.h"
#include "transport/schedule/copies.h"
#include "transport/schedule/late.h"
#include "transport/schedule/reduce.h"

namespace pg_sdma {
namespace {

// How often a rank that leaves looks at its device, which rings no bell.
constexpr std::chrono::milliseconds kLookForEnd{1};

// A stream that waits for a dead peer cannot be released without letting what follows compute on
// bytes that never came, so the process ends, as it does with NCCL.
[[noreturn]] void end_process(const std::string& why) {
  std::fprintf(stderr, "pg_sdma: %s Ending this process.\n", why.c_str());
  std::fflush(stderr);
  std::abort();
}

}  // namespace

DirectTransport::DirectTransport(const Options& options, std::shared_ptr<Engine> engine,
                                 ControlPage page, std::vector<std::string> identities,
                                 std::unique_ptr<Peers> peers)
    : self_{options.group, options.rank, options.world},
      engine_(std::move(engine)),
      page_(std::move(page)),
      health_(self_, page_, std::move(peers), engine_->stream_ordered(), options.on_fault),
      host_(self_, page_, health_, options.spin),
      staging_(page_, self_.rank, self_.world,
               std::min(StagingBuffers::kMostLead, page_.slots().count / 2)),
      memory_(self_.rank, engine_, page_, std::move(identities)),
      // A device takes what it is given into its page tables, and needs the counters alone.
      queue_(engine_->queue(page_.data(),
                            engine_->stream_ordered() ? page_.counters_size() : page_.size())),
      agreement_(self_, options.ring, options.keep_slots,
                 {*engine_, page_, memory_, health_, host_, *queue_, staging_}) {
  if (engine_->stream_ordered()) {
    watchdog_ = std::make_unique<Watchdog>(page_, health_.peers(), self_.group, self_.rank,
                                           self_.world, [this](const std::string& why) {
                                             health_.tell(why);
                                             end_process(why);
                                           });
  }
}

DirectTransport::~DirectTransport() {
  // The watchdog is there meanwhile: a stream that waits for a peer that is gone would hold the
  // driver at the process's end.
  queue_.reset();
  watchdog_.reset();
  // Only then: who has departed while peers still count on it is a fault to them.
  page_.depart(self_.rank);
}

void DirectTransport::run(const Call& call, const Operation& operation, Reducer* reducer) {
  inject::at("carry");
  memory_.begin(operation.number);
  CounterWait waiting(self_, page_, health_, host_, operation);
  const bool on_streams = engine_->stream_ordered();
  guarded(operation, [&] {
    ProgramWriter write(page_, self_.rank, self_.world, operation);
    std::list<Launch> launches;
    LatePrograms programs;
    const bool external = external_ && !operation.reduces;
    if (reducer != nullptr) {
      programs.copies = sums(write, call, *reducer, on_streams, launches);
    } else if (operation.in_order_of_arrival()) {
      programs = copies_in_order_of_arrival(write);
    } else if (operation.staged) {
      programs.copies = staging_.copies(write);
    } else if (!external) {
      programs.copies =
          on_streams ? copies_on_streams(write) : copies_on_thread(write, engine_->wave_bytes());
    }
    if (watchdog_ && !operation.trial) {
      watchdog_->watch(operation.number, operation.name, call.total_bytes(), operation.deadline(),
                       operation.reduces ? "input" : "output");
    }
    const auto began = Clock::now();
    if (external) {
      run_external(call, write, waiting);
    } else {
      queue_->run(programs.copies, waiting);
      if (!programs.end.empty()) queue_->run(programs.end, waiting);
    }
    agreement_.note_time(call, operation, Clock::now() - began);
    // A rank that raises gives its input away, perhaps while this one was reading it.
    if (!on_streams) health_.check_fault();
    memory_.settle(operation.number, /*direct=*/true);
  });
}

// The counters are for who watches: it ends only once every peer's shard is here, and once this
// rank's has been read.
void DirectTransport::run_external(const Call& call, ProgramWriter& write, Waiter& waiting) {
  write.tell_ready();
  queue_->run(write.take(), waiting);
  external_->enqueue(call, *queue_);
  write.tell_done();
  queue_->run(write.take(), waiting);
}

void DirectTransport::guarded(const Operation& operation, const std::function<void()>& body) {
  try {
    body();
  } catch (const GroupFault&) {
    throw;
  } catch (const CopyFailed& error) {
    std::string who;
    for (int peer = 0; peer < self_.world; ++peer) {
      if (static_cast<uint64_t>(health_.peers().pid(peer)) != error.space) continue;
      who = "the memory of rank " + std::to_string(peer) + " cannot be read, look at its output: ";
    }
    fail(operation, who + error.what());
  } catch (const std::exception& error) {
    fail(operation, error.what());
  }
}

// Peers count on this rank after a direct verdict: it cannot just leave.
void DirectTransport::fail(const Operation& operation, const std::string& why) {
  // The self-test tells the peers, but where they wait in the call itself.
  const bool told = operation.trial && (engine_->stream_ordered() || external_);
  if (told) throw std::runtime_error("the self-test failed: " + why);
  health_.fail(messages::title(self_, operation) + ": " + why);
}

void DirectTransport::use(std::unique_ptr<ExternalAllGather> external) {
  external_ = std::move(external);
  agreement_.expose_no_gathers();
}

std::string DirectTransport::way() const {
  if (external_) return external_->name();
  if (staging_.any()) return "slots";
  return pushes() ? "push" : "pull";
}

void DirectTransport::check(const Operation& operation) {
  health_.check_fault();
  health_.check_peers(operation, /*under_way=*/true);
}

void DirectTransport::abandon(bool copies) {
  if (copies) memory_.keep_open();
  page_.ready(self_.rank) = number();
  page_.done(self_.rank) = number();
}

// The peers need this rank's memory, and its copies, until all is done.
void DirectTransport::drain() {
  if (!watchdog_ || watchdog_->idle()) return;
  std::string why;
  try {
    const std::shared_ptr<Queue::Marker> last = queue_->mark();
    while (!watchdog_->idle() && !health_.broken() && !last->passed()) {
      std::this_thread::sleep_for(kLookForEnd);
    }
    return;
  } catch (const std::exception& error) {
    why = error.what();
  }
  // No wait of this device's is left that the watchdog would have to guard.
  watchdog_.reset();
  health_.declare("rank " + std::to_string(self_.rank) + " left group " + self_.group +
                  " with operations pending, because its device has failed "
                  "(look at its output for the cause): " +
                  why);
  health_.tell(page_.fault());
}

}  // namespace pg_sdma
