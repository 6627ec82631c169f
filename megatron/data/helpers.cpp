// Index builders whose inner loops numpy cannot express fast enough. Every function here has a twin of the same name
// (suffix _numpy) in helpers.py or sentence_map.py that returns the same bytes; these document the meaning and check the
// arguments.
//
// The first two hot loops jump through memory at random (a shuffle, and document lengths in shuffled order), so they are bound by
// cache misses, not by arithmetic: the addresses of the next few dozen steps are known early and are prefetched.

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <numeric>
#include <random>
#include <stdexcept>
#include <utility>
#include <vector>

namespace py = pybind11;

namespace {

constexpr int kLookahead = 64;  // steps between prefetch and use; 32 to 128 measure alike

template <class T>
using Array = py::array_t<T, py::array::c_style>;

// MT19937 (Matsumoto and Nishimura 1998), run on the state of a numpy RandomState.
class MersenneTwister {
 public:
  MersenneTwister(uint32_t* key, int position) : key_(key), position_(position) {}

  uint32_t next() {
    if (position_ == kSize) refill();
    uint32_t y = key_[position_++];
    y ^= y >> 11;
    y ^= (y << 7) & 0x9d2c5680u;
    y ^= (y << 15) & 0xefc60000u;
    return y ^ (y >> 18);
  }

  int position() const { return position_; }

 private:
  static constexpr int kSize = 624, kShift = 397;

  static uint32_t twist(uint32_t upper, uint32_t lower) {
    const uint32_t y = (upper & 0x80000000u) | (lower & 0x7fffffffu);
    return (y >> 1) ^ ((0u - (y & 1u)) & 0x9908b0dfu);
  }

  void refill() {
    int i = 0;
    for (; i < kSize - kShift; ++i) key_[i] = key_[i + kShift] ^ twist(key_[i], key_[i + 1]);
    for (; i < kSize - 1; ++i) key_[i] = key_[i + kShift - kSize] ^ twist(key_[i], key_[i + 1]);
    key_[i] = key_[kShift - 1] ^ twist(key_[i], key_[0]);
    position_ = 0;
  }

  uint32_t* key_;
  int position_;
};

uint32_t mask_of(uint32_t value) {
  for (int shift = 1; shift < 32; shift *= 2) value |= value >> shift;
  return value;
}

// Fisher-Yates from the top, each partner drawn by masked rejection: the order of draws of RandomState.shuffle.
template <class T>
int shuffle(Array<T> values, Array<uint32_t> key, int position) {
  T* data = values.mutable_data();
  MersenneTwister generator(key.mutable_data(), position);
  const int64_t size = values.size();
  py::gil_scoped_release unlocked;
  uint32_t partner[kLookahead];
  for (int64_t top = size - 1; top >= 1;) {
    const int count = static_cast<int>(std::min<int64_t>(kLookahead, top));
    for (int step = 0; step < count; ++step) {
      const uint32_t bound = static_cast<uint32_t>(top - step);
      const uint32_t mask = mask_of(bound);
      uint32_t draw = generator.next() & mask;
      while (draw > bound) draw = generator.next() & mask;
      partner[step] = draw;
      __builtin_prefetch(data + draw, 1);
    }
    for (int step = 0; step < count; ++step) std::swap(data[top - step], data[partner[step]]);
    top -= count;
  }
  return generator.position();
}

template <class Out, class Document>
Array<Out> build_sample_idx(Array<int32_t> sizes, Array<Document> documents, int64_t sequence_length, int64_t num_samples,
                            int64_t extra_token) {
  const int32_t* size_of = sizes.data();
  const Document* document = documents.data();
  const int64_t num_sizes = sizes.size(), num_documents = documents.size();
  Array<Out> result({num_samples + 1, int64_t{2}});
  Out* out = result.mutable_data();
  int64_t sample = 1, start = 0;
  bool in_range = true;
  {
    py::gil_scoped_release unlocked;
    out[0] = out[1] = 0;
    // Sample k begins at token k * sequence_length. Without the extra token an entry stands behind the last token of
    // the sample before it, which may be the end of a document rather than the start of the next.
    int64_t boundary = sequence_length;
    const int64_t lag = 1 - extra_token;
    for (int64_t i = 0; i < num_documents && sample <= num_samples; ++i) {
      if (i + kLookahead < num_documents) {
        const auto ahead = static_cast<uint64_t>(document[i + kLookahead]);
        if (ahead < static_cast<uint64_t>(num_sizes)) __builtin_prefetch(size_of + ahead);
      }
      if (static_cast<uint64_t>(document[i]) >= static_cast<uint64_t>(num_sizes)) {
        in_range = false;
        break;
      }
      const int64_t end = start + size_of[document[i]];
      for (; boundary - lag < end && sample <= num_samples; ++sample, boundary += sequence_length) {
        out[2 * sample] = static_cast<Out>(i);
        out[2 * sample + 1] = static_cast<Out>(boundary - start);
      }
      start = end;
    }
  }
  if (!in_range) throw py::value_error("a document number lies outside the data set");
  if (sample == num_samples && num_documents > 0) {  // the last, partial sample ends with the last document
    out[2 * sample] = static_cast<Out>(num_documents - 1);
    out[2 * sample + 1] = static_cast<Out>(size_of[document[num_documents - 1]] - extra_token);
    ++sample;
  }
  if (sample <= num_samples) throw py::value_error("the documents hold fewer tokens than the samples need");
  return result;
}

using Blend = std::pair<Array<int16_t>, Array<int64_t>>;

// At each step the source that is furthest behind weight * step wins, the first one among equals; a source that has
// given as many samples as its limit is out. No limits: sources never end.
Blend blend(const double* weight, const int64_t* limit, int64_t num_sources, int64_t size) {
  Array<int16_t> source(size);
  Array<int64_t> source_sample(size);
  int16_t* source_out = source.mutable_data();
  int64_t* sample_out = source_sample.mutable_data();
  {  // the lock is taken again before the arrays are returned: copying them counts references
    py::gil_scoped_release unlocked;
    constexpr double kClosed = std::numeric_limits<double>::infinity();
    std::vector<double> taken(num_sources, 0.0);  // exact: counts stay below 2^53
    for (int64_t i = 0; limit && i < num_sources; ++i) {
      if (limit[i] == 0) taken[i] = kClosed;
    }
    for (int64_t step = 0; step < size; ++step) {
      const double position = std::max<double>(static_cast<double>(step), 1.0);
      int64_t winner = 0;
      double largest = weight[0] * position - taken[0];
      for (int64_t i = 1; i < num_sources; ++i) {
        const double error = weight[i] * position - taken[i];
        if (error > largest) {
          largest = error;
          winner = i;
        }
      }
      source_out[step] = static_cast<int16_t>(winner);
      sample_out[step] = static_cast<int64_t>(taken[winner]);
      taken[winner] += 1.0;
      if (limit && taken[winner] == static_cast<double>(limit[winner])) taken[winner] = kClosed;
    }
  }
  return {source, source_sample};
}

Blend build_blending_indices(Array<double> weights, int64_t size) {
  return blend(weights.data(), nullptr, weights.size(), size);
}

Blend build_exhaustive_blending_indices(Array<int64_t> sizes) {
  const int64_t* size_of = sizes.data();
  const int64_t total = std::accumulate(size_of, size_of + sizes.size(), int64_t{0});
  std::vector<double> weight(size_of, size_of + sizes.size());
  for (double& each : weight) each /= static_cast<double>(total);
  return blend(weight.data(), size_of, sizes.size(), total);
}

constexpr int32_t kLongSentence = 512;  // tokens; a document with a longer sentence gives no samples

struct SentenceRules {
  int64_t min_sentences;  // of a document, and of a sample
  int64_t min_left;       // sentences that must remain behind a sample that does not end its document
  int64_t long_from;      // documents of fewer sentences are never refused for a long one
};

// One epoch: groups the sentences of each document into samples. ``target(document)`` gives the length that a sample
// aims at, asked once at the start of a document and after every sample; ``emit(document, first, end, target)`` takes it.
template <class Target, class Emit>
void group_sentences(const int64_t* bounds, int64_t num_documents, const int32_t* sizes, const SentenceRules& rules,
                     Target&& target, Emit&& emit) {
  for (int64_t document = 0; document < num_documents; ++document) {
    const int64_t begin = bounds[document], end = bounds[document + 1], count = end - begin;
    if (count < rules.min_sentences) continue;
    if (count >= rules.long_from &&
        std::any_of(sizes + begin, sizes + end, [](int32_t size) { return size > kLongSentence; }))
      continue;
    int64_t wanted = target(document), first = begin, tokens = 0;
    for (int64_t i = begin; i < end; ++i) {
      tokens += sizes[i];
      const int64_t left = end - 1 - i, taken = i + 1 - first;
      if ((tokens >= wanted && left >= rules.min_left && taken >= rules.min_sentences) || left == 0) {
        emit(document, first, i + 1, wanted);
        first = i + 1;
        tokens = 0;
        wanted = target(document);
      }
    }
  }
}

// Runs ``epoch(emit)`` until ``num_epochs`` or, asked between epochs, ``max_samples``; once to count, once to fill rows
// of ``width`` numbers; then shuffles the rows. An epoch without a sample ends it: the next would have none either.
template <class Row, class Pass>
Array<Row> fill_and_shuffle(Pass&& pass, int64_t num_epochs, uint64_t max_samples, int64_t width, int64_t seed) {
  int64_t count = 0;
  {
    py::gil_scoped_release unlocked;
    count = pass(num_epochs, max_samples, static_cast<Row*>(nullptr));
  }
  Array<Row> result({count, width});
  Row* rows = result.mutable_data();
  {
    py::gil_scoped_release unlocked;
    pass(num_epochs, max_samples, rows);
    std::mt19937_64 generator(static_cast<uint64_t>(seed + 1));
    for (int64_t i = count - 1; i > 0; --i) {
      const auto j = static_cast<int64_t>(generator() % static_cast<uint64_t>(i + 1));
      std::swap_ranges(rows + i * width, rows + (i + 1) * width, rows + j * width);
    }
  }
  return result;
}

template <class Row>
Array<Row> build_mapping(Array<int64_t> bounds, Array<int32_t> sizes, int64_t num_epochs, uint64_t max_samples,
                         int64_t max_length, int64_t short_ratio, int64_t seed, int64_t min_sentences) {
  const int64_t* bound = bounds.data();
  const int32_t* size_of = sizes.data();
  const int64_t num_documents = bounds.size() - 1;
  auto pass = [&](int64_t epochs, uint64_t most, Row* rows) {
    std::mt19937 generator(static_cast<uint32_t>(seed));  // both passes draw the same
    auto target = [&](int64_t) -> int64_t {
      if (short_ratio == 0) return max_length;
      const auto draw = static_cast<int64_t>(generator());
      return draw % short_ratio == 0 ? 2 + draw % (max_length - 1) : max_length;
    };
    int64_t count = 0;
    for (int64_t epoch = 0; epoch < epochs && static_cast<uint64_t>(count) < most; ++epoch) {
      const int64_t before = count;
      group_sentences(bound, num_documents, size_of, {min_sentences, 2, 2}, target,
                      [&](int64_t, int64_t first, int64_t end, int64_t wanted) {
                        if (rows) {
                          rows[3 * count] = static_cast<Row>(first);
                          rows[3 * count + 1] = static_cast<Row>(end);
                          rows[3 * count + 2] = static_cast<Row>(wanted);
                        }
                        ++count;
                      });
      if (count == before) break;
    }
    return count;
  };
  return fill_and_shuffle<Row>(pass, num_epochs, max_samples, 3, seed);
}

template <class Row>
Array<Row> build_blocks_mapping(Array<int64_t> bounds, Array<int32_t> sizes, Array<int32_t> title_sizes,
                                int64_t num_epochs, uint64_t max_samples, int64_t max_length, int64_t seed,
                                int64_t min_sentences) {
  const int64_t* bound = bounds.data();
  const int32_t *size_of = sizes.data(), *title = title_sizes.data();
  const int64_t num_documents = bounds.size() - 1;
  auto pass = [&](int64_t epochs, uint64_t most, Row* rows) {
    int64_t count = 0;
    for (int64_t epoch = 0; epoch < epochs && static_cast<uint64_t>(count) < most; ++epoch) {
      const int64_t before = count;
      group_sentences(bound, num_documents, size_of, {min_sentences, min_sentences, min_sentences},
                      [&](int64_t document) { return max_length - title[document]; },
                      [&](int64_t document, int64_t first, int64_t end, int64_t) {
                        if (rows) {
                          rows[4 * count] = static_cast<Row>(first);
                          rows[4 * count + 1] = static_cast<Row>(end);
                          rows[4 * count + 2] = static_cast<Row>(document);
                          rows[4 * count + 3] = static_cast<Row>(count - before);
                        }
                        ++count;
                      });
      if (count == before) break;
    }
    return count;
  };
  return fill_and_shuffle<Row>(pass, num_epochs, max_samples, 4, seed);
}

}  // namespace

PYBIND11_MODULE(megatron_data_helpers, module) {
  module.attr("source_sha256") = SOURCE_SHA256;
#ifdef NDEBUG
  module.attr("has_assertions") = false;
#else
  module.attr("has_assertions") = true;
#endif
  module.def("shuffle_int32", &shuffle<int32_t>);
  module.def("shuffle_uint32", &shuffle<uint32_t>);
  module.def("shuffle_int64", &shuffle<int64_t>);
  module.def("build_sample_idx_int32", &build_sample_idx<int32_t, int32_t>);
  module.def("build_sample_idx_int64", &build_sample_idx<int64_t, int64_t>);
  module.def("build_blending_indices", &build_blending_indices);
  module.def("build_exhaustive_blending_indices", &build_exhaustive_blending_indices);
  module.def("build_mapping_uint32", &build_mapping<uint32_t>);
  module.def("build_mapping_uint64", &build_mapping<uint64_t>);
  module.def("build_blocks_mapping_uint32", &build_blocks_mapping<uint32_t>);
  module.def("build_blocks_mapping_uint64", &build_blocks_mapping<uint64_t>);
}
