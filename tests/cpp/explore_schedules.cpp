// Random orders of the steps of all schedules (transport/schedule/), whole operations one after the
// other, in one thread: a scheduler picks whose step is next among those that streams would let
// run, and often starves a rank.
//
//   explore_schedules <schedule> <world> <staging buffers of a rank> <runs> <seed> [broken rule]
//
// Schedules: pull, push, thread, late, sums, thread-sums, staged.
//
// Broken rules, to show that each is needed:
//   no-ready   rank 0 does not wait until rank 1 is ready
//   early-done rank 0 says that it is done before it has copied anything
//   no-done    rank 0 does not wait until rank 1 is done
//   own-last   (late) rank 0 is ready before its own shard is in its place
//   together   (late) rank 0 says that it is done while it may still be reading
//   no-join    (sums) receive buffers are filled again before they are summed
//   no-fork    (sums) slices are summed before they are there
//   no-filled  (staged) rank 0 does not wait for rank 1's buffers
//   early      (staged) rank 0 says that a buffer is filled before it is
//   ahead      (staged) ranks fill one chunk more in advance
//
// Prints how many steps ran and how many times a step was not ready to. Fails on a wrong byte, on
// one outside of an output, and when no rank can go on.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <list>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "schedule_model.h"

namespace {

using namespace pg_sdma;
using namespace schedules;

class Rank;
using Ranks = std::vector<std::unique_ptr<Rank>>;

class Rank {
 public:
  Rank(const Options& options, ControlPage page, int rank)
      : options_(options),
        page_(std::move(page)),
        rank_(rank),
        staging_(page_, rank, options.world, lead(options)),
        random_(random_of(options.seed, 1000 + static_cast<unsigned>(rank))) {
    const auto world = static_cast<size_t>(options.world);
    for (int o = 0; o < kOperations; ++o) {
      tensors_.emplace_back();
      calls_.emplace_back();
      for (const size_t size : shape_of(options_, o).sizes) {
        const bool sums = options_.sums();
        tensors_[o].emplace_back(sums ? size * world : size, sums ? size : size * world);
      }
      for (size_t t = 0; t < tensors_[o].size(); ++t) add(calls_[o], o, t);
    }
  }

  bool over() const { return operation_ == kOperations; }
  // Of the operation that this rank is at: whether its inputs are there.
  bool has_begun(int operation) const {
    return operation_ > operation || (operation_ == operation && begun_);
  }

  // Runs a step. False where this rank has to wait.
  bool step(const Ranks& ranks) {
    if (!begun_) return begin();
    if (programs_.empty() && !enqueue(ranks)) return false;
    while (!programs_.empty() && programs_.front().over()) programs_.pop_front();
    if (programs_.empty()) return end();
    return programs_.front().step(random_);
  }

  // Nobody may touch what its rank has done with.
  bool untouched() const {
    const auto scribbled = [](const std::vector<unsigned char>& bytes) {
      return std::all_of(bytes.begin(), bytes.end(),
                         [](unsigned char byte) { return byte == kScribble; });
    };
    for (const auto& operation : tensors_) {
      for (const Tensor& tensor : operation) {
        if (!scribbled(tensor.input) || !scribbled(tensor.output)) return false;
      }
    }
    return true;
  }

 private:
  static uint64_t lead(const Options& options) {
    return options.slots / 2 + (options.broken == "ahead" ? 1 : 0);
  }

  // Each rank for itself.
  bool in_place(int operation) const {
    return (options_.seed + static_cast<unsigned>(operation + rank_)) % 3 == 0;
  }

  size_t size_of(int operation, size_t t) const { return shape_of(options_, operation).sizes[t]; }

  unsigned char* own(int operation, size_t t) {
    Tensor& tensor = tensors_[operation][t];
    const size_t size = size_of(operation, t);
    if (!in_place(operation)) return tensor.in();
    return options_.sums() ? tensor.in() : tensor.out() + size * static_cast<size_t>(rank_);
  }

  void add(Call& call, int operation, size_t t) {
    const size_t size = size_of(operation, t);
    Tensor& tensor = tensors_[operation][t];
    if (options_.sums()) {
      call.reduction = "sum";
      Share share{t, {}, size, tensor.out()};
      for (int r = 0; r < options_.world; ++r) {
        share.slices.push_back(tensor.in() + size * static_cast<size_t>(r));
      }
      if (in_place(operation)) share.output = tensor.in() + size * static_cast<size_t>(rank_);
      call.shares.push_back(share);
      return;
    }
    Piece piece{own(operation, t), size, {}};
    for (int r = 0; r < options_.world; ++r) {
      piece.outputs.push_back(tensor.out() + size * static_cast<size_t>(r));
    }
    call.pieces.push_back(piece);
  }

  // The caller's stream has come to the operation: its inputs are there.
  bool begin() {
    const size_t tensors = tensors_[operation_].size();
    for (size_t t = 0; t < tensors; ++t) {
      const size_t size = size_of(operation_, t);
      Tensor& tensor = tensors_[operation_][t];
      std::fill(tensor.output.begin(), tensor.output.end(), kPoison);
      for (int to = 0; to < (options_.sums() ? options_.world : 1); ++to) {
        unsigned char* first = own(operation_, t) + size * static_cast<size_t>(to);
        for (size_t i = 0; i < size; ++i) first[i] = byte(operation_, t, rank_, to, i);
      }
    }
    begun_ = true;
    return true;
  }

  Operation agreed(const Ranks& ranks) {
    const bool pushes = options_.schedule == "push" || options_.schedule == "late";
    Operation operation;
    operation.number = static_cast<uint64_t>(operation_) + 1;
    operation.exchange = exchange_of(calls_[operation_], rank_, options_.world, pushes);
    for (const auto& peer : ranks) {
      const Exchange theirs =
          exchange_of(peer->calls_[operation_], peer->rank_, options_.world, pushes);
      for (const Region& region : theirs.exposed) {
        operation.regions.push_back({0, reinterpret_cast<uintptr_t>(region.data)});
      }
    }
    if (options_.schedule == "late") {
      const std::vector<int> arrival = shape_of(options_, operation_).arrival;
      operation.earlier.emplace(arrival.begin(), std::find(arrival.begin(), arrival.end(), rank_));
    }
    return operation;
  }

  // False where this rank's host has yet to wait for a peer's.
  bool enqueue(const Ranks& ranks) {
    if (options_.on_thread()) {
      for (const auto& peer : ranks) {
        if (!peer->has_begun(operation_)) return false;
      }
    }
    operation_agreed_ = agreed(ranks);
    ProgramWriter write(page_, rank_, options_.world, operation_agreed_);
    std::vector<Program> programs;
    if (options_.sums()) {
      const size_t room = kMostElement * (1 + random_() % 4);
      reducer_ = std::make_unique<ByteReducer>(rank_, options_.world, 1 + random_() % 3, room);
      launches_.clear();
      programs.push_back(
          sums(write, calls_[operation_], *reducer_, !options_.on_thread(), launches_));
    } else if (options_.schedule == "late") {
      LatePrograms late = copies_in_order_of_arrival(write);
      programs.push_back(std::move(late.copies));
      programs.push_back(std::move(late.end));
    } else if (options_.schedule == "staged") {
      programs.push_back(staging_.copies(write));
    } else if (options_.schedule == "thread") {
      programs.push_back(copies_on_thread(write, 1 + random_() % 100));
    } else {
      programs.push_back(copies_on_streams(write));
    }
    if (options_.broken == "no-join" || options_.broken == "no-fork") spoil_sums(programs[0]);
    if (rank_ == 0) spoil(programs);
    for (Program& program : programs) programs_.emplace_back(in_order(std::move(program)));
    return true;
  }

  // The calling thread runs one step after the other.
  Program in_order(Program program) const {
    if (options_.on_thread() || options_.schedule == "staged") {
      for (Step& step : program) step.track = 0;
    }
    return program;
  }

  bool waits(const Step& step, Counter& (ControlPage::*counter)(int)) {
    return step.kind == Step::Kind::kWait && step.counter == &(page_.*counter)(1);
  }

  void spoil_sums(Program& program) {
    const auto kind = options_.broken == "no-join" ? Step::Kind::kJoin : Step::Kind::kFork;
    // The last join is the caller's.
    std::erase_if(program, [&](const Step& step) {
      return step.kind == kind && (kind == Step::Kind::kFork || &step != &program.back());
    });
  }

  void spoil(std::vector<Program>& programs) {
    const std::string& rule = options_.broken;
    Program& first = programs.front();
    Program& last = programs.back();
    if (rule == "no-ready") {
      std::erase_if(first, [&](const Step& step) { return waits(step, &ControlPage::ready); });
    } else if (rule == "no-filled") {
      std::erase_if(first, [&](const Step& step) { return waits(step, &ControlPage::filled); });
    } else if (rule == "no-done") {
      std::erase_if(last, [&](const Step& step) { return waits(step, &ControlPage::done); });
    } else if (rule == "early-done") {
      const auto tells = [&](const Step& step) {
        return step.kind == Step::Kind::kWrite && step.counter == &page_.done(0);
      };
      const Step done = *std::find_if(last.begin(), last.end(), tells);
      std::erase_if(last, tells);
      first.insert(first.begin(), done);
    } else if (rule == "own-last") {
      const auto ready = std::find_if(first.begin(), first.end(), [](const Step& step) {
        return step.kind == Step::Kind::kWrite;
      });
      std::rotate(first.begin(), ready, ready + 1);
    } else if (rule == "together") {
      first.insert(first.end(), last.begin(), last.end());
      programs.resize(1);
    } else if (rule == "early") {
      for (size_t i = 0; i < first.size(); ++i) {
        if (first[i].kind != Step::Kind::kWrite) continue;
        for (size_t j = i; j > 0 && in_buffers(first[j - 1].destination); --j) {
          std::swap(first[j], first[j - 1]);
        }
      }
    }
  }

  bool in_buffers(const void* address) const {
    return page_.slot(0, 0) <= address && address < page_.slot(options_.world, 0);
  }

  [[noreturn]] void wrong(const char* what, size_t t) const {
    std::fprintf(stderr, "seed %u, rank %d, operation %d: %s of tensor %zu\n", options_.seed, rank_,
                 operation_, what, t);
    std::exit(1);
  }

  unsigned char right(size_t t, size_t i) const {
    const size_t size = size_of(operation_, t);
    if (!options_.sums()) return byte(operation_, t, static_cast<int>(i / size), 0, i % size);
    unsigned char sum = 0;
    for (int r = 0; r < options_.world; ++r) sum = then(sum, byte(operation_, t, r, rank_, i));
    return sum;
  }

  bool end() {
    for (size_t t = 0; t < tensors_[operation_].size(); ++t) {
      Tensor& tensor = tensors_[operation_][t];
      const size_t size = size_of(operation_, t);
      const bool in_input = options_.sums() && in_place(operation_);
      const unsigned char* output =
          in_input ? tensor.in() + size * static_cast<size_t>(rank_) : tensor.out();
      const size_t bytes = options_.sums() ? size : size * static_cast<size_t>(options_.world);
      for (size_t i = 0; i < bytes; ++i) {
        if (output[i] != right(t, i)) wrong("wrong byte", t);
      }
      for (size_t i = 0; i < kGuard; ++i) {
        if (tensor.output[i] != kPoison ||
            tensor.output.rbegin()[static_cast<ptrdiff_t>(i)] != kPoison) {
          wrong("wrong byte outside", t);
        }
      }
      // The caller may do what it likes with both now.
      std::fill(tensor.input.begin(), tensor.input.end(), kScribble);
      std::fill(tensor.output.begin(), tensor.output.end(), kScribble);
    }
    ++operation_;
    begun_ = false;
    return true;
  }

  const Options options_;
  ControlPage page_;
  const int rank_;
  StagingBuffers staging_;
  std::minstd_rand random_;
  std::vector<std::vector<Tensor>> tensors_;  // of all operations
  std::vector<Call> calls_;
  int operation_ = 0;
  bool begun_ = false;
  Operation operation_agreed_;
  std::unique_ptr<ByteReducer> reducer_;
  std::list<Launch> launches_;
  std::deque<Running> programs_;
};

// False where all are stuck.
bool run(const Options& options) {
  const SlotShape slots =
      options.schedule == "staged" ? SlotShape{options.slots, kSlotBytes} : SlotShape{};
  const ControlPage page = ControlPage::create(options.world, 2, slots);
  Ranks ranks;
  for (int rank = 0; rank < options.world; ++rank) {
    ranks.push_back(std::make_unique<Rank>(options, page.share(), rank));
  }
  std::minstd_rand random = random_of(options.seed, 0);
  const auto starved = random() % static_cast<unsigned>(options.world);
  const unsigned often = random() % 2 == 0 ? 1 : 1 + random() % 40;
  size_t stuck = 0;  // choices in a row that could not go on
  for (size_t rank = 0; stuck < 1000;) {
    if (std::all_of(ranks.begin(), ranks.end(), [](const auto& r) { return r->over(); })) {
      for (const auto& one : ranks) {
        if (one->untouched()) continue;
        std::fprintf(stderr, "seed %u: a wrong byte after the end\n", options.seed);
        std::exit(1);
      }
      return true;
    }
    // Goes on with one until it must wait, as often as not.
    if (stuck > 0 || random() % often == 0) {
      rank = random() % static_cast<unsigned>(options.world);
      if (rank == starved && stuck == 0 && random() % 50 != 0) continue;
    }
    stuck = !ranks[rank]->over() && ranks[rank]->step(ranks) ? 0 : stuck + 1;
  }
  std::fprintf(stderr, "seed %u: no rank can go on\n", options.seed);
  return false;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 6) {
    std::fprintf(stderr, "see the top of %s for the arguments\n", __FILE__);
    return 2;
  }
  Options options;
  options.schedule = argv[1];
  options.world = std::atoi(argv[2]);
  options.slots = static_cast<uint64_t>(std::atoi(argv[3]));
  const int runs = std::atoi(argv[4]);
  options.seed = static_cast<unsigned>(std::atoi(argv[5])) * 1000000;
  if (argc > 6) options.broken = argv[6];
  for (int i = 0; i < runs; ++i, ++options.seed) {
    if (!run(options)) return 1;
  }
  std::printf("%lu steps, %lu times one was not ready\n", steps, blocked);
}
