// See module_sampling.h. Arrays that a call keeps are kept alive by kernels/cpu.py.
#include "module_sampling.h"

#include <nanobind/stl/optional.h>

#include <optional>
#include <vector>

#include "machine.h"
#include "module_arrays.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace KVIST_NAMESPACE {

namespace {

// Rows to draw from, again and again: what they ask and the logits stay where they are, and hold other numbers at the next draw.
class Sampling {
 public:
  Sampling(Machine& machine, Array<const uint8_t, 2> rows) : machine_(machine), token_ids_(rows.shape(0)), outcomes_(rows.shape(0)) {
    require(rows.shape(1) == sizeof(SampleRow) && reinterpret_cast<uintptr_t>(rows.data()) % alignof(SampleRow) == 0, "sample: rows");
    batch_ = {reinterpret_cast<const SampleRow*>(rows.data()), static_cast<int>(rows.shape(0)), std::vector<int>(rows.shape(0), -1), {}};
  }

  void adjust(int row, const Adjustment& change) {
    require(row >= 0 && row < batch_.count, "adjust: no such row");
    batch_.adjustment_of[static_cast<size_t>(row)] = static_cast<int>(batch_.adjustments.size());
    batch_.adjustments.push_back(change);
  }

  void bind_logits(Array<const float, 2> logits) {
    require(logits.shape(0) == token_ids_.size(), "sample: rows do not match");
    require(logits.shape(1) > 0 && logits.shape(1) <= static_cast<size_t>(kMaxVocabulary), "sample: vocabulary");
    logits_ = logits.data();
    vocabulary_ = static_cast<int>(logits.shape(1));
  }

  // Token ids and outcomes.
  nb::tuple draw() {
    require(logits_ != nullptr, "sample: no logits");
    require(batch_.fits(vocabulary_), "sample: a mask or an id does not fit the vocabulary");
    {
      const nb::gil_scoped_release released;
      machine_.sample(logits_, vocabulary_, batch_, token_ids_.data(), outcomes_.data());
    }
    return nb::make_tuple(list_of(token_ids_), list_of(outcomes_));
  }

 private:
  static nb::list list_of(const std::vector<int32_t>& values) {
    nb::list list;
    for (const int32_t value : values) list.append(value);
    return list;
  }

  Machine& machine_;
  SampleBatch batch_;
  const float* logits_ = nullptr;
  int vocabulary_ = 0;
  std::vector<int32_t> token_ids_, outcomes_;
};

// Null, or an array's first element; `count` is its length.
template <class T>
const T* optional_array(const std::optional<Array<const T, 1>>& array, long& count) {
  count = array ? static_cast<long>(array->shape(0)) : 0;
  return array ? array->data() : nullptr;
}

void adjust(Sampling& self, int row, std::optional<Array<const uint32_t, 1>> mask, std::optional<Array<const int32_t, 1>> bias_ids,
            std::optional<Array<const double, 1>> bias, std::optional<Array<const int32_t, 1>> seen,
            std::optional<Array<const int32_t, 1>> counts, double repetition, double frequency, double presence) {
  Adjustment a;
  long biases = 0, num_counts = 0;
  a.mask = optional_array(mask, a.mask_words);
  a.bias_ids = optional_array(bias_ids, a.num_biased);
  a.bias = optional_array(bias, biases);
  a.seen = optional_array(seen, a.num_seen);
  a.counts = optional_array(counts, num_counts);
  require(biases == a.num_biased && num_counts == a.num_seen, "adjust: ids and values differ in length");
  a.repetition = repetition;
  a.frequency = frequency;
  a.presence = presence;
  self.adjust(row, a);
}

void check_ids(const Array<const int32_t, 1>& ids, size_t count, size_t limit, const char* what) {
  require(ids.shape(0) == count, what);
  for (size_t i = 0; i < count; ++i) require(ids(i) >= 0 && static_cast<size_t>(ids(i)) < limit, what);
}

void score_rows(Machine& machine, Array<const float, 2> logits, Array<const int32_t, 1> rows, Array<const int32_t, 1> token_ids,
                Array<const int32_t, 1> tops, Array<float, 1> values, Array<float, 1> peaks, Array<uint64_t, 1> totals,
                Array<int32_t, 1> ranks, Array<int32_t, 2> top_ids, Array<float, 2> top_logits) {
  const size_t count = rows.shape(0), width = top_ids.shape(1);
  require(logits.shape(1) > 0 && logits.shape(1) <= static_cast<size_t>(kMaxVocabulary), "score: vocabulary");
  check_ids(rows, count, logits.shape(0), "score: rows");
  check_ids(token_ids, count, logits.shape(1), "score: token ids");
  check_ids(tops, count, width + 1, "score: tops");
  require(values.shape(0) == count && peaks.shape(0) == count && totals.shape(0) == count && ranks.shape(0) == count &&
              top_ids.shape(0) == count && top_logits.shape(0) == count && top_logits.shape(1) == width,
          "score: results do not match");
  machine.score(logits.data(), static_cast<int>(logits.shape(1)),
                {rows.data(), token_ids.data(), tops.data(), static_cast<int>(count), static_cast<int>(width)},
                {values.data(), peaks.data(), totals.data(), ranks.data(), top_ids.data(), top_logits.data()});
}

}  // namespace

void define_sampling(nb::module_& m) {
  nb::class_<Sampling>(m, "Sampling")
      // Converted arrays would be gone after the call, and with them what is read.
      .def(nb::init<Machine&, Array<const uint8_t, 2>>(), "machine"_a, "rows"_a.noconvert(), nb::keep_alive<1, 2>())
      .def("adjust", &adjust, "row"_a, "mask"_a.noconvert().none(), "bias_ids"_a.noconvert().none(), "bias"_a.noconvert().none(),
           "seen"_a.noconvert().none(), "counts"_a.noconvert().none(), "repetition"_a, "frequency"_a, "presence"_a)
      .def("bind_logits", &Sampling::bind_logits, "logits"_a.noconvert())
      .def("draw", &Sampling::draw);
  m.def("score", &score_rows, "machine"_a, "logits"_a, "rows"_a, "token_ids"_a, "tops"_a, "values"_a, "peaks"_a, "totals"_a, "ranks"_a,
        "top_ids"_a, "top_logits"_a, nb::call_guard<nb::gil_scoped_release>());
}

}  // namespace KVIST_NAMESPACE
