// The Python module of one instruction-set build (nanobind). Shapes and types are checked here; kernels/cpu.py checks meanings.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <optional>

#include "bf16_dot.h"
#include "cpu_features.h"
#include "machine.h"
#include "module_arrays.h"
#include "module_program.h"
#include "module_sampling.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace KVIST_NAMESPACE {

namespace {

using AnyBytes = Array<const uint8_t, 1>;

Format format_of(const std::string& name) {
  if (name == "f32") return Format::f32;
  if (name == "f16") return Format::f16;
  if (name == "bf16") return Format::bf16;
  if (name == "w8a8") return Format::w8;
  if (name == "w4a8") return Format::w4;
  throw nb::value_error("unknown weight format");
}

KvFormat kv_format_of(const std::string& name) {
  if (name == "bf16") return KvFormat::bf16;
  if (name == "f16") return KvFormat::f16;
  if (name == "f32") return KvFormat::f32;
  throw nb::value_error("unknown KV format");
}

void add_segment(Linear& linear, const std::string& format, int n, int k, AnyBytes data, std::optional<AnyBytes> scale,
                 std::optional<AnyBytes> minimum, bool half_scale, std::optional<Array<const float, 1>> bias) {
  Segment s{format_of(format), n, k, data.data(), scale ? scale->data() : nullptr, minimum ? minimum->data() : nullptr, half_scale,
            bias ? bias->data() : nullptr};
  const size_t panels = static_cast<size_t>(s.panels());
  require(n > 0 && k > 0 && data.shape(0) == panels * s.panel_bytes(), "weight data does not match its shape");
  if (s.quantized()) {
    const size_t bytes = panels * s.groups() * kPanel * (half_scale ? 2 : 4);
    require(k % kGroup == 0 && scale && scale->shape(0) == bytes, "weight scales do not match their shape");
    require(s.format != Format::w4 || (minimum && minimum->shape(0) == bytes), "weight minimums do not match their shape");
  }
  require(!bias || bias->shape(0) == static_cast<size_t>(n), "bias does not match its shape");
  require(linear.segments.empty() || linear.k() == k, "segments must share k");
  linear.segments.push_back(s);
}

void check_rows(size_t rows, size_t width, size_t expected, const char* what) { require(rows < (1u << 30) && width == expected, what); }

}  // namespace

}  // namespace KVIST_NAMESPACE

NB_MODULE(KVIST_MODULE, m) {
  using namespace KVIST_NAMESPACE;
  m.def("cpu_features", &kvist_cpu_features, "Instruction-set flags of this CPU that the builds ask for.");
  m.def("bf16_dot_as_defined", &bf16_dot_as_defined, "Whether this CPU's 16-bit dot product has the bits that this build relies on.");
  nb::set_leak_warnings(false);  // handles may outlive the module at exit, which is no leak
  m.attr("kernel_version") = 1;
  m.attr("max_head_dim") = kMaxHeadDim;

  nb::class_<Linear>(m, "Linear")
      .def(nb::init<>())
      .def("add", &add_segment, "format"_a, "n"_a, "k"_a, "data"_a, "scale"_a.none(), "minimum"_a.none(), "half_scale"_a, "bias"_a.none())
      .def_prop_ro("n", &Linear::n)
      .def_prop_ro("k", &Linear::k);

  nb::class_<AttentionLayer>(m, "AttentionLayer")
      .def("__init__",
           [](AttentionLayer* self, Array<uint8_t, 2> arena, size_t layer_offset, const std::string& format, int block_size, int group,
              int heads, int kv_heads, int dim, float scale, int window, Array<const float, 2> cosine, Array<const float, 2> sine,
              std::optional<Array<const float, 1>> q_norm, std::optional<Array<const float, 1>> k_norm, float norm_eps) {
             require(dim % 16 == 0 && dim <= kMaxHeadDim && block_size % kKeyTile == 0, "unsupported head or block size");
             require(heads % kv_heads == 0, "query heads must be a multiple of kv heads");
             require(cosine.shape(0) == sine.shape(0) && cosine.shape(1) == sine.shape(1), "cosines and sines differ in shape");
             require(2 * cosine.shape(1) <= static_cast<size_t>(dim), "rotation is wider than a head");
             new (self) AttentionLayer{arena.data(), arena.shape(1), layer_offset, kv_format_of(format), block_size, group, heads, kv_heads, dim,
                                       scale, window, cosine.data(), sine.data(), static_cast<long>(cosine.shape(0)),
                                       static_cast<int>(cosine.shape(1)), q_norm ? q_norm->data() : nullptr, k_norm ? k_norm->data() : nullptr,
                                       norm_eps};
           },
           "arena"_a, "layer_offset"_a, "format"_a, "block_size"_a, "group"_a, "heads"_a, "kv_heads"_a, "dim"_a, "scale"_a, "window"_a,
           "cosine"_a, "sine"_a, "q_norm"_a.none(), "k_norm"_a.none(), "norm_eps"_a);

  nb::class_<Step>(m, "Step")
      .def("__init__",
           [](Step* self, Array<const int32_t, 1> positions, Array<const int32_t, 1> query_start) {
             new (self) Step{{static_cast<int>(positions.shape(0)), static_cast<int>(query_start.shape(0)) - 1, positions.data(), query_start.data()}, {}};
           })
      .def("add_group", [](Step& self, Array<const int32_t, 2> block_table, Array<const int64_t, 1> slots) {
        require(block_table.shape(0) == static_cast<size_t>(self.batch.sequences), "block table does not match the sequences");
        require(slots.shape(0) == static_cast<size_t>(self.batch.rows), "slot mapping does not match the rows");
        self.groups.push_back({block_table.data(), slots.data(), static_cast<long>(block_table.shape(1))});
      });

  nb::class_<Machine>(m, "Machine")
      .def(nb::init<int, const std::vector<int>&>(), "num_threads"_a, "cpus"_a = std::vector<int>())
      .def_prop_ro("bound", &Machine::bound)
      .def("peaks",
           [](Machine& self, size_t memory_bytes) {
             Peaks peaks;
             {
               const nb::gil_scoped_release released;
               peaks = self.peaks(memory_bytes);
             }
             return nb::make_tuple(peaks.read_bytes, peaks.f32, peaks.w8a8, peaks.w4a8);
           }, "memory_bytes"_a)
      .def_prop_ro("num_threads", &Machine::num_threads)
      .def("embed",
           [](Machine& self, const Linear& table, Array<const int32_t, 1> ids, Array<float, 2> out) {
             check_rows(out.shape(0), out.shape(1), static_cast<size_t>(table.k()), "embed: out does not match the table");
             require(ids.shape(0) == out.shape(0), "embed: ids do not match out");
             for (size_t i = 0; i < ids.shape(0); ++i) require(ids(i) >= 0 && ids(i) < table.n(), "embed: id outside the table");
             self.embed(table, ids.data(), static_cast<int>(ids.shape(0)), out.data());
           }, Release())
      .def("norm_linear",
           [](Machine& self, Array<const float, 2> x, Array<const float, 1> norm, float eps, const Linear& weight, Array<float, 2> out) {
             check_rows(x.shape(0), x.shape(1), static_cast<size_t>(weight.k()), "norm_linear: x does not match the weight");
             require(norm.shape(0) == x.shape(1) && out.shape(0) == x.shape(0) && out.shape(1) == static_cast<size_t>(weight.n()),
                     "norm_linear: norm or out does not match");
             self.norm_linear(x.data(), static_cast<int>(x.shape(0)), norm.data(), eps, weight, out.data());
           }, Release())
      .def("linear_add",
           [](Machine& self, Array<const float, 2> x, const Linear& weight, Array<float, 2> residual) {
             check_rows(x.shape(0), x.shape(1), static_cast<size_t>(weight.k()), "linear_add: x does not match the weight");
             require(residual.shape(0) == x.shape(0) && residual.shape(1) == static_cast<size_t>(weight.n()), "linear_add: residual does not match");
             self.linear_add(x.data(), static_cast<int>(x.shape(0)), weight, residual.data());
           }, Release())
      .def("gated_mlp",
           [](Machine& self, Array<float, 2> x, Array<const float, 1> norm, float eps, const Linear& gate_up, const Linear& down) {
             require(gate_up.segments.size() == 2 && gate_up.segments[0].n == gate_up.segments[1].n, "gated_mlp: gate and up differ");
             require(x.shape(1) == static_cast<size_t>(gate_up.k()) && norm.shape(0) == x.shape(1) && down.n() == gate_up.k() &&
                         down.k() == gate_up.segments[0].n,
                     "gated_mlp: shapes do not match");
             self.gated_mlp(x.data(), static_cast<int>(x.shape(0)), norm.data(), eps, gate_up, down);
           }, Release())
      .def("rope_write",
           [](Machine& self, const Step& step, const AttentionLayer& layer, Array<float, 2> qkv) {
             check_rows(qkv.shape(0), qkv.shape(1), static_cast<size_t>(layer.heads + 2 * layer.kv_heads) * layer.dim, "rope_write: qkv");
             require(qkv.shape(0) == static_cast<size_t>(step.batch.rows) && layer.group < static_cast<int>(step.groups.size()), "rope_write: batch");
             self.rope_write(step, layer, qkv.data());
           }, Release())
      .def("attend",
           [](Machine& self, const Step& step, const AttentionLayer& layer, Array<const float, 2> qkv, Array<float, 2> out) {
             check_rows(qkv.shape(0), qkv.shape(1), static_cast<size_t>(layer.heads + 2 * layer.kv_heads) * layer.dim, "attend: qkv");
             require(out.shape(0) == qkv.shape(0) && out.shape(1) == static_cast<size_t>(layer.heads) * layer.dim, "attend: out");
             require(qkv.shape(0) == static_cast<size_t>(step.batch.rows) && layer.group < static_cast<int>(step.groups.size()), "attend: batch");
             self.attend(step, layer, qkv.data(), out.data());
           }, Release());

  define_program(m);
  define_sampling(m);
}
