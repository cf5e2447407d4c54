// Random orders of the steps of slot programs (transport/slots.h), whole operations one after the
// other, in one thread: a scheduler picks whose step is next, and often starves a rank.
//
//   explore_slots <world> <slots of a rank> <runs> <seed> [broken rule]
//
// Broken rules, to show that each is needed:
//   no-wait  rank 0 does not wait for rank 1's slots
//   early    rank 0 tells that a slot is filled before it is
//   ahead    ranks fill one wave more in advance
//
// Prints how many steps ran and how many waits had to wait. Fails on a wrong byte, on one outside
// of an output, and when no rank can go on.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "transport/slots.h"

namespace {

using namespace pg_sdma;

constexpr int kOperations = 6;
constexpr size_t kSlotBytes = 24;

struct Options {
  int world = 2;
  uint64_t slots = 8;
  unsigned seed = 1;
  std::string broken;
};

uint64_t waits = 0;
uint64_t blocked = 0;
uint64_t steps = 0;

// One tensor of one operation on one rank, between bytes that nobody may touch.
struct Tensor {
  std::vector<unsigned char> input;   // unused in place
  std::vector<unsigned char> output;  // a guard, the shards, a guard
};
constexpr size_t kGuard = 3;
constexpr unsigned char kPoison = 0xA5;

class Rank {
 public:
  Rank(const Options& options, ControlPage page, int rank)
      : options_(options),
        page_(std::move(page)),
        rank_(rank),
        slots_(page_, rank, options.world, lead(options)) {
    begin();
  }

  bool over() const { return operation_ == kOperations; }

  // Runs the next step. False where it has to wait.
  bool step() {
    const Step& step = program_[at_];
    ++steps;
    switch (step.kind) {
      case Step::Kind::kWait:
        if (step.counter->load() < step.value) {
          ++blocked;
          return false;
        }
        ++waits;
        break;
      case Step::Kind::kWrite:
        step.counter->store(step.value);
        break;
      case Step::Kind::kCopy:
        std::memcpy(step.destination, reinterpret_cast<const void*>(step.source), step.bytes);
        break;
    }
    if (++at_ == program_.size()) {
      end();
      if (++operation_ < kOperations) begin();
    }
    return true;
  }

 private:
  static uint64_t lead(const Options& options) {
    return options.slots / 2 + (options.broken == "ahead" ? 1 : 0);
  }

  // Equal on all ranks.
  std::vector<size_t> sizes() const {
    std::minstd_rand random(options_.seed * 7919 + static_cast<unsigned>(operation_) * 104729 + 1);
    random.discard(3);
    std::vector<size_t> sizes(1 + random() % 3);
    for (size_t& size : sizes) size = random() % (random() % 2 == 0 ? 30 : 400);
    return sizes;
  }

  // The byte at `i` of what rank `of` gathers.
  unsigned char byte(int of, size_t tensor, size_t i) const {
    const auto operation = static_cast<size_t>(operation_);
    return static_cast<unsigned char>((i * 131 + tensor * 17 + operation * 59 + i / 256) * 7 +
                                      static_cast<size_t>(of) * 101);
  }

  void begin() {
    tensors_.clear();
    Call call;
    const std::vector<size_t> bytes = sizes();
    for (const size_t size : bytes) {
      tensors_.push_back({});
      Tensor& tensor = tensors_.back();
      tensor.output.assign(size * options_.world + 2 * kGuard, kPoison);
      Piece piece{nullptr, size, {}};
      for (int r = 0; r < options_.world; ++r) {
        piece.outputs.push_back(tensor.output.data() + kGuard + size * r);
      }
      tensor.input.resize(size + 1);  // never an empty vector, which may have no address
      auto* input =
          static_cast<unsigned char*>(in_place() ? piece.outputs[rank_] : tensor.input.data());
      for (size_t i = 0; i < size; ++i) input[i] = byte(rank_, tensors_.size() - 1, i);
      piece.input = input;
      call.pieces.push_back(piece);
    }
    program_.clear();
    at_ = 0;
    slots_.write(call, program_);
    if (rank_ == 0) spoil();
  }

  // Each rank for itself.
  bool in_place() const { return (options_.seed + operation_ + rank_) % 3 == 0; }

  void end() {
    for (size_t t = 0; t < tensors_.size(); ++t) {
      Tensor& tensor = tensors_[t];
      const size_t size = (tensor.output.size() - 2 * kGuard) / options_.world;
      for (size_t i = 0; i < tensor.output.size(); ++i) {
        const bool inside = i >= kGuard && i < tensor.output.size() - kGuard;
        const size_t in_shards = i - kGuard;
        const unsigned char right =
            inside ? byte(static_cast<int>(in_shards / size), t, in_shards % size) : kPoison;
        if (tensor.output[i] == right) continue;
        std::fprintf(stderr, "seed %u, rank %d, operation %d: wrong byte at %zu of tensor %zu\n",
                     options_.seed, rank_, operation_, i, t);
        std::exit(1);
      }
      // The caller may do what it likes with both now.
      std::fill(tensor.input.begin(), tensor.input.end(), 0x5A);
      std::fill(tensor.output.begin(), tensor.output.end(), 0x5A);
    }
  }

  void spoil() {
    if (options_.broken == "no-wait") {
      std::erase_if(program_, [&](const Step& step) {
        return step.kind == Step::Kind::kWait && page_.writer(*step.counter) == 1;
      });
    } else if (options_.broken == "early") {
      for (size_t i = 0; i < program_.size(); ++i) {
        if (program_[i].kind != Step::Kind::kWrite) continue;
        for (size_t j = i; j > 0 && in_slots(program_[j - 1].destination); --j) {
          std::swap(program_[j], program_[j - 1]);
        }
      }
    }
  }

  bool in_slots(const void* address) const {
    return page_.slot(0, 0) <= address && address < page_.slot(options_.world, 0);
  }

  const Options options_;
  ControlPage page_;
  const int rank_;
  Slots slots_;
  int operation_ = 0;
  std::vector<Tensor> tensors_;
  Program program_;
  size_t at_ = 0;
};

// False where all are stuck.
bool run(const Options& options) {
  const ControlPage page = ControlPage::create(options.world, 2, {options.slots, kSlotBytes});
  std::vector<std::unique_ptr<Rank>> ranks;
  for (int rank = 0; rank < options.world; ++rank) {
    ranks.push_back(std::make_unique<Rank>(options, page.share(), rank));
  }
  std::minstd_rand random(options.seed);
  random.discard(3);
  const auto starved = random() % static_cast<unsigned>(options.world);
  const unsigned often = random() % 2 == 0 ? 1 : 1 + random() % 40;
  size_t stuck = 0;  // choices in a row that could not go on
  for (size_t rank = 0; stuck < 1000;) {
    if (std::all_of(ranks.begin(), ranks.end(), [](const auto& r) { return r->over(); })) {
      return true;
    }
    // Goes on with one until it must wait, as often as not.
    if (stuck > 0 || random() % often == 0) {
      rank = random() % static_cast<unsigned>(options.world);
      if (rank == starved && stuck == 0 && random() % 50 != 0) continue;
    }
    stuck = !ranks[rank]->over() && ranks[rank]->step() ? 0 : stuck + 1;
  }
  std::fprintf(stderr, "seed %u: no rank can go on\n", options.seed);
  return false;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 5) {
    std::fprintf(stderr, "see the top of %s for the arguments\n", __FILE__);
    return 2;
  }
  Options options;
  options.world = std::atoi(argv[1]);
  options.slots = static_cast<uint64_t>(std::atoi(argv[2]));
  const int runs = std::atoi(argv[3]);
  options.seed = static_cast<unsigned>(std::atoi(argv[4])) * 1000000;
  if (argc > 5) options.broken = argv[5];
  for (int i = 0; i < runs; ++i, ++options.seed) {
    if (!run(options)) return 1;
  }
  std::printf("%lu steps, %lu waits, %lu times one had to wait\n", steps, waits, blocked);
}
