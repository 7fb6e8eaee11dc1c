# SPDX-License-Identifier: Apache-2.0
# Spot VMs with a GPU: one, or several of one job.  After a preemption an Auto Scaling group replaces the VM, in any
# of several types and subnets with capacity.  The role has exactly the permissions of ../../permissions/aws-vm.json.

terraform {
  required_version = ">= 1.5"
  required_providers {
    aws = {
      source  = "hashicorp/aws"
      version = ">= 6.0"
    }
  }
}

variable "run" {
  type        = string
  description = "Name of the training run; two groups never share one."
}

variable "bucket" {
  type        = string
  description = "An existing bucket, best with versioning."
}

variable "prefix" {
  type        = string
  default     = "checkpoints"
  description = "Checkpoints go below it."
}

variable "vms" {
  type        = number
  default     = 1
  description = "VMs of the job; several only if one launcher starts the ranks on all of them."
}

variable "on_demand" {
  type        = number
  default     = 0
  description = "VMs on demand, the others are Spot. 1: one VM of the job is not preempted."
}

variable "subnets" {
  type        = list(string)
  description = "As many zones as possible, to find spare GPUs."
}

variable "security_groups" {
  type        = list(string)
  default     = []
  description = "Out to S3, Systems Manager and the Auto Scaling service; in only for SSH with key_name and Prometheus. Empty: the VPC's default."
}

variable "key_name" {
  type        = string
  default     = null
  description = "Key pair for SSH; without it use Systems Manager, whose agent the image needs (Debian's has none)."
}

variable "disk_gb" {
  type        = number
  default     = 100
  description = "Root disk: the image, and staging where the type has no disk of its own. Not less than the image has."
}

variable "instance_types" {
  type        = list(string)
  default     = ["g5.xlarge", "g5.2xlarge", "g6.xlarge", "g6.2xlarge"]
  description = "Types that can each continue the run."
}

variable "image_name" {
  type        = string
  default     = "swansong"
  description = "As given to Packer; the newest image is taken."
}

locals {
  group = "swansong-${var.run}"
}

# aws-cn and aws-us-gov use other names.
data "aws_partition" "here" {}

data "aws_ami" "swansong" {
  owners      = ["self"]
  most_recent = true

  filter {
    name   = "name"
    values = ["${var.image_name}-*"]
  }
}

resource "aws_iam_role" "vm" {
  name_prefix = "swansong-"
  assume_role_policy = jsonencode({
    Version = "2012-10-17"
    Statement = [{
      Effect    = "Allow"
      Action    = "sts:AssumeRole"
      Principal = { Service = "ec2.${data.aws_partition.here.dns_suffix}" }
    }]
  })
}

resource "aws_iam_role_policy" "vm" {
  name_prefix = "swansong-"
  role        = aws_iam_role.vm.id
  policy = replace(replace(replace(replace(
    file("${path.module}/../../permissions/aws-vm.json"),
    "arn:aws:", "arn:${data.aws_partition.here.partition}:"),
    "BUCKET", var.bucket),
    "PREFIX", var.prefix),
  "GROUP", local.group)
}

# Log in without an open port: aws ssm start-session --target INSTANCE
resource "aws_iam_role_policy_attachment" "session" {
  role       = aws_iam_role.vm.name
  policy_arn = "arn:${data.aws_partition.here.partition}:iam::aws:policy/AmazonSSMManagedInstanceCore"
}

resource "aws_iam_instance_profile" "vm" {
  name_prefix = "swansong-"
  role        = aws_iam_role.vm.name
}

resource "aws_launch_template" "vm" {
  name_prefix            = "swansong-"
  image_id               = data.aws_ami.swansong.id
  key_name               = var.key_name
  vpc_security_group_ids = var.security_groups
  update_default_version = true

  iam_instance_profile {
    arn = aws_iam_instance_profile.vm.arn
  }

  block_device_mappings {
    device_name = data.aws_ami.swansong.root_device_name

    ebs {
      volume_size           = var.disk_gb
      volume_type           = "gp3"
      encrypted             = true
      delete_on_termination = true
    }
  }

  # One hop: containers with a separate network get neither notices nor the VM's credentials.
  metadata_options {
    http_endpoint               = "enabled"
    http_tokens                 = "required"
    http_put_response_hop_limit = 1
  }

  user_data = base64encode(templatefile("${path.module}/../../first-boot/aws-user-data.yaml", {
    run   = var.run
    store = "s3://${var.bucket}/${var.prefix}"
    group = local.group
  }))
}

resource "aws_autoscaling_group" "vm" {
  name                      = local.group
  min_size                  = var.vms
  max_size                  = var.vms
  vpc_zone_identifier       = var.subnets
  wait_for_capacity_timeout = "0"

  # A replacement beside a VM that still trains would take the run over from it.
  capacity_rebalance = false

  # To balance the zones, the group would end a VM that trains.
  suspended_processes = ["AZRebalance"]

  mixed_instances_policy {
    instances_distribution {
      on_demand_base_capacity                  = var.on_demand
      on_demand_percentage_above_base_capacity = 0
      spot_allocation_strategy                 = "price-capacity-optimized"
    }

    launch_template {
      launch_template_specification {
        launch_template_id = aws_launch_template.vm.id
        version            = aws_launch_template.vm.latest_version
      }

      dynamic "override" {
        for_each = var.instance_types
        content {
          instance_type = override.value
        }
      }
    }
  }

  # Same values as sources.asg_hook and asg_grace_s in the user data: the hook is held until the verdict.
  initial_lifecycle_hook {
    name                 = "swansong"
    lifecycle_transition = "autoscaling:EC2_INSTANCE_TERMINATING"
    heartbeat_timeout    = 300
    default_result       = "CONTINUE"
  }

  tag {
    key                 = "Name"
    value               = local.group
    propagate_at_launch = true
  }

  # monitoring/prometheus/scrape.example.yml finds the VM by these two.
  tag {
    key                 = "swansong"
    value               = "true"
    propagate_at_launch = true
  }

  tag {
    key                 = "run"
    value               = var.run
    propagate_at_launch = true
  }
}
