// Token ids from a package by plain ONNX Runtime: greedy, state by value, with the package's kernels.
//   dotnet add package Microsoft.ML.OnnxRuntime
//   ORT_DISABLE_TELEMETRY=1 dotnet run -- DIR 20 5 6 7 8
using System;
using System.Collections.Generic;
using System.IO;
using System.Linq;
using Microsoft.ML.OnnxRuntime;

static class Greedy
{
    static int Main(string[] args)
    {
        if (args.Length < 3)
        {
            Console.Error.WriteLine("usage: greedy PACKAGE TOKENS ID...");
            return 2;
        }
        int wanted = int.Parse(args[1]);
        long[] ids = args.Skip(2).Select(long.Parse).ToArray();
        long room = wanted + ids.Length;
        string kernels = Path.GetFullPath(Path.Combine(args[0], "libstill_onnxruntime.so"));
        var settings = new SessionOptions();
        settings.AddSessionConfigEntry("still.provider", "cpu");
        if (File.Exists(kernels)) settings.RegisterCustomOpLibrary(kernels); // without it function bodies run
        using (var session = new InferenceSession(Path.Combine(args[0], "model.onnx"), settings))
        using (var options = new RunOptions())
        {
            var feed = new Dictionary<string, OrtValue>();
            foreach (var input in session.InputMetadata)
            {
                // One row of the batch; what grows has room for every token, more than it needs. All zero is empty.
                long[] shape = input.Value.Dimensions.Select((size, axis) => size >= 0 ? size : axis == 0 ? 1 : room).ToArray();
                var kind = input.Value.ElementDataType;
                feed[input.Key] = OrtValue.CreateAllocatedTensorValue(OrtAllocator.DefaultInstance, kind, shape);
                feed[input.Key].GetTensorMutableRawData().Clear();
            }
            var outputs = session.OutputNames.ToList();
            var answer = new List<long>();
            while (answer.Count < wanted) // a prompt longer than the manifest's prefill_tokens goes in pieces
            {
                Replace(feed, "input_ids", OrtValue.CreateTensorValueFromMemory(ids, new long[] { 1, ids.Length }));
                feed["new_tokens"].GetTensorMutableDataAsSpan<long>().Fill(ids.Length);
                var found = session.Run(options, feed, outputs);
                using (var logits = found[outputs.IndexOf("logits")]) // [1, 1, vocabulary], float32
                {
                    float[] row = logits.GetTensorDataAsSpan<float>().ToArray();
                    ids = new long[] { Array.IndexOf(row, row.Max()) };
                }
                answer.Add(ids[0]);
                foreach (string name in outputs.Where(name => name.StartsWith("present_")))
                    Replace(feed, "past_" + name.Substring(8), found[outputs.IndexOf(name)]); // the next call's past
            }
            Console.WriteLine(string.Join(" ", answer));
        }
        return 0;
    }

    static void Replace(Dictionary<string, OrtValue> feed, string name, OrtValue value)
    {
        feed[name].Dispose();
        feed[name] = value;
    }
}
